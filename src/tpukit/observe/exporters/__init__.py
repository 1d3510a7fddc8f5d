"""Where readings go: Prometheus, Cloud Monitoring, a file beside the run, TensorBoard."""
