"""Published formats of quantized checkpoints, behind one protocol."""
