"""The programs that `h200.py` runs side by side, one process each."""
