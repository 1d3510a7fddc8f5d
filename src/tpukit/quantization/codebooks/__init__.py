"""Codebooks, and the k-means that fits them."""
