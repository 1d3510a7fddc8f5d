"""What fits: batch sizes and memory of one step."""
