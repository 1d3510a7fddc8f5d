"""RMS norm of a residual stream: the addition before it and the one behind its gradient fused."""
