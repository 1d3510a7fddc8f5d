"""Checks of manifests, one topic a file; `lint` runs them all."""
