"""Where readings come from: one small protocol, one file a source."""
