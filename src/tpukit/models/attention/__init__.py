"""Attention implementations of a model, and their placement on a mesh."""
