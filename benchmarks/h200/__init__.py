"""The programs that `train_h200.py` runs side by side, one process each."""
