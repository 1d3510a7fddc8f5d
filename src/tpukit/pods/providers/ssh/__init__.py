"""Hosts that are reached by ssh: those of cloud pods, and your own by a list."""
