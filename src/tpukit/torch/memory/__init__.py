"""Memory for torch tensors within a chip's limits: counted, pooled, watched."""
