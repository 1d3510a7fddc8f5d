"""Optimizers by name, their state formats and schedules."""
