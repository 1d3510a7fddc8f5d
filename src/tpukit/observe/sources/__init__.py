"""Sources of readings, behind one protocol (`readings.Source`)."""
