"""What reads runs and programs: diagnosis, and later monitor, profiler and dashboard."""
