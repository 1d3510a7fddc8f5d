"""Cloud TPU by its own API (v2 to v6e): queued resources, with ssh to their machines."""
