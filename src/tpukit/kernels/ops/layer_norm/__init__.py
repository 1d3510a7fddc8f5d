"""Layer normalisation in one pass over HBM."""
