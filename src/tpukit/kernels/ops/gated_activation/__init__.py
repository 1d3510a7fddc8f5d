"""The product of an activated gate and a value, whose gradient is one pass."""
