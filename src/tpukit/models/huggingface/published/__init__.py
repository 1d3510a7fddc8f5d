"""Quantized checkpoints as they are published: one file a format, all behind one protocol."""
