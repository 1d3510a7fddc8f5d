"""The agent on a host of a pod, which starts one process of a job and ends with it."""
