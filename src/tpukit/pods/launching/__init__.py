"""From a job file to processes on a pod: what is shipped, who watches, what is shown."""
