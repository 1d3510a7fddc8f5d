"""Rotary positions: frequencies, cached tables, and turning in one pass over HBM."""
