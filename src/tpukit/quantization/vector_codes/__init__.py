"""Matrices as codes of vectors: what holds them, and the codec that chooses them."""
