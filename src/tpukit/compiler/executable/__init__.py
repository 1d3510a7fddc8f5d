"""Compiled programs as files: written here, loaded on the slice they are for."""
