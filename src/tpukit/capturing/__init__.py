"""Any jax program, unmodified: run as if it were on a slice, its step recorded instead of run."""
