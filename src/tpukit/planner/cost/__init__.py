"""Memory, time and money by arithmetic."""
