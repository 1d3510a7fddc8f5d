"""Quantized checkpoints that others publish, in the formats that kernels here read."""
