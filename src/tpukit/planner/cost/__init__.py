"""Memory, time and money of candidates by arithmetic."""
