"""The search for a format per matrix, and the tuning of quantized models."""
