"""Keep a job running: one attempt after another, each from the last checkpoint."""
