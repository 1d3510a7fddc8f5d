"""Exporters of readings: Prometheus, Cloud Monitoring, a file beside the run, TensorBoard."""
