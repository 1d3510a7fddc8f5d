"""What an op is, where it is registered, and which implementation runs."""
