"""Metrics of a pod's hosts, where document 004 imports them from; they live in `observe`."""

from ..observe import MetricsCollector as MetricsCollector
from ..observe import TpuMonitor as TpuMonitor

__all__ = ["MetricsCollector", "TpuMonitor"]
