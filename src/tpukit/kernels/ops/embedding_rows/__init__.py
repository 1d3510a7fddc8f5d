"""Rows of a table by number, and their gradient."""
