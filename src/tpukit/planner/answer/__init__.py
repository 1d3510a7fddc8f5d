"""The answer of a plan as objects, terminal text and HTML page."""
