"""From a job file to processes on a pod: the bundle, the supervisor and the log."""
