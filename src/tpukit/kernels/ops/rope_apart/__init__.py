"""Queries and keys that one product gives side by side: turned, and taken apart."""
