"""Hosts that are reached by ssh: those of cloud pods, and the user's own."""
