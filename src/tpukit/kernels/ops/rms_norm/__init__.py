"""RMS normalisation in one pass over HBM."""
