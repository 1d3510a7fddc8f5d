"""The stages of a rehearsal and their results."""
