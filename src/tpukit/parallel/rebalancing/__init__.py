"""Moving work from busy devices to idle ones."""
