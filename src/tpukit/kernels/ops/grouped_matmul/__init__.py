"""Rows sorted by group, each times the weight of its group."""
