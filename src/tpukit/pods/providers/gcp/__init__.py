"""Cloud TPU by its own API (v2 … v6e): queued resources, with ssh to their machines."""
