"""Choose the slice size of a job: policies, measurements and decisions with reasons."""
