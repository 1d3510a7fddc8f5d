"""`tpukit top`: chips, hosts and the run on one screen; nothing here loads jax."""
