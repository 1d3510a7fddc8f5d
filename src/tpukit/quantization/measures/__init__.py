"""What quantizing costs and gains: losses on held-out data, text, and time."""
