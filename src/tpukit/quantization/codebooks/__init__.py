"""Codebooks: vectors that codes stand for, and the k-means that finds them."""
