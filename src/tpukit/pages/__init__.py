"""The kit that every HTML page is made of: markup, parts, charts, and one frame with one policy."""
