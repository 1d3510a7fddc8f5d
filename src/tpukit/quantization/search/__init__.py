"""Formats chosen by what each matrix is worth, and the numbers tuned once they are."""
