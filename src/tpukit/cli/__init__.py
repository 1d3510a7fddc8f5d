"""The command line: one file a command, thin; the work is done in the rooms above."""
