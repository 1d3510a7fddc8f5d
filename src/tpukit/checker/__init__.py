"""Check with the TPU compiler, without a TPU, whether a job fits and how long a step takes."""
