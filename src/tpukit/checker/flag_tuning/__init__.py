"""A search over compiler options, each tried by a compile."""
