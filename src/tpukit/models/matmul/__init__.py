"""Matmuls of a model: 8-bit formats, and the choice of a format by module path."""
