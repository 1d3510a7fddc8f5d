"""Measured kernel timings: the rows, an analytic model of each kernel family, its calibration."""
