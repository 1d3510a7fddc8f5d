"""Compute Engine (v5p, v6e, TPU7x): managed instance groups, with ssh to their machines."""
