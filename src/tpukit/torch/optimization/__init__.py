"""Optimising a module: narrow formats, gradient checkpoints, fused attention and norms."""
