"""What runs on a host of a pod: an agent that starts one process of a job and never outlives us."""
