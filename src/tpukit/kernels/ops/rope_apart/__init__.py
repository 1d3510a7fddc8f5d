"""Queries and keys that one product gives side by side: rotated, and taken apart."""
