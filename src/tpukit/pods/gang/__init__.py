"""The processes of one attempt at a job, which start and end together."""
