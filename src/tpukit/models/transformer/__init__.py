"""The reference transformer: configuration, layers, accounting."""
