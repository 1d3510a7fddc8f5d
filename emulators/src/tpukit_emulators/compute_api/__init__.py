"""Compute Engine as far as pods need it: workload policies, templates, groups, their machines."""
