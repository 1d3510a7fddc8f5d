"""Attention that never holds the score matrix."""
