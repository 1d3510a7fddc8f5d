"""Metrics of a pod's hosts under document 004's module name; they are defined in `observe`."""

from ..observe import MetricsCollector as MetricsCollector
from ..observe import TpuMonitor as TpuMonitor

__all__ = ["MetricsCollector", "TpuMonitor"]
