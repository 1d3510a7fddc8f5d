"""What the backward pass recomputes."""
