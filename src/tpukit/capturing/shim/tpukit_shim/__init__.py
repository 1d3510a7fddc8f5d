"""The code that runs in the user's process during a capture; it needs only jax."""
