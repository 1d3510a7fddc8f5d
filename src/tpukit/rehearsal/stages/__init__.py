"""The stages of a rehearsal, one file each: a stage and what it finds."""
