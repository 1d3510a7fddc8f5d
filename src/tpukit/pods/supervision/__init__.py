"""Keeping a job going: attempts one after another, each from the last checkpoint."""
