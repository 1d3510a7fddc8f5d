"""Quantized arrays and models on disk, checked when they are read."""
