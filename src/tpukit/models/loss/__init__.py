"""Losses, whole or in chunks."""
