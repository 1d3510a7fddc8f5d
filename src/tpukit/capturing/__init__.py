"""Run an unmodified jax program as if on a slice, and record its training step."""
