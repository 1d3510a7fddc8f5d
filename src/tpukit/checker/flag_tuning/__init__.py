"""Search compiler options, each tried by a compile."""
