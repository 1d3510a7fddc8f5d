"""Measures of a quantized model: error on held-out data, generated text, and speed."""
