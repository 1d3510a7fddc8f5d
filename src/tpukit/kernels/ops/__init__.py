"""The ops, a folder each, all with the same file names."""
