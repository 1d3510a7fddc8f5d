"""Layers in stages, micro-batches flowing through them."""
