"""Spot capacity: which zone to ask, what a useful step costs there, and what not to pay."""
