"""Checks of manifests, one topic per file; `lint` runs them all."""
