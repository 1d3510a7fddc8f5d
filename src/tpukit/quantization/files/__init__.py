"""Files of quantized arrays and models."""
