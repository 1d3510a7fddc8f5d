"""Profiles: recording them, reading what they hold, and saying what bounds the program."""
