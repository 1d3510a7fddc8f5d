"""What planning answers, and how it is shown."""
