"""What the norms over rows have in common."""
