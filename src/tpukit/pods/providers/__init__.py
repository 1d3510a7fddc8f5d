"""Providers of pods, one folder each, behind one protocol."""
