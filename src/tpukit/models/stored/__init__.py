"""Stored parameters: parameters kept in quantized formats, found by the matmuls that use them."""
