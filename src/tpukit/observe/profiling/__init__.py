"""Profiles: recording, reading, and what bounds a program."""
