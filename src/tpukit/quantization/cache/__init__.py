"""Quantized KV caches: their codebooks, the error they cause, and the choice of a format."""
