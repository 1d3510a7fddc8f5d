"""What moves the objects of a cluster: one controller a file, none of which knows HTTP."""
