"""Search candidates, rank them, and verify the best with the compiler."""
