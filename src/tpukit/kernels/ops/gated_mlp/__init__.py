"""The gated feed-forward block, with gate and up projection in one pass."""
