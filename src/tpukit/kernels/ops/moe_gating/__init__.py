"""Top-k gating of a mixture of experts."""
