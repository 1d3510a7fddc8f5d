"""The command line: one thin module per command; the other rooms do the work."""
