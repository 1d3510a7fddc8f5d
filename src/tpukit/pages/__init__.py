"""The parts of every HTML page: markup, sections, charts, and one frame with one policy."""
