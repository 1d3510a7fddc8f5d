"""Which size of slice a job should have now: policies, measurements, decisions that explain."""
