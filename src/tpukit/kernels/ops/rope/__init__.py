"""Rotary positions: frequencies, cached tables, and the rotation in one pass over HBM."""
