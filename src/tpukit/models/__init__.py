"""Workloads: reference transformers, presets, remat, and adapters for anyone's model."""
