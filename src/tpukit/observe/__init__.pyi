# Written by `make format` from the list in __init__.py.

from .alerts import Alert as Alert
from .alerts import AlertRule as AlertRule
from .diagnosis.evidence import Bottlenecks as Bottlenecks
from .diagnosis.evidence import InputRate as InputRate
from .diagnosis.evidence import StepTiming as StepTiming
from .diagnosis.evidence import measure_input as measure_input
from .diagnosis.evidence import time_steps as time_steps
from .diagnosis.performance import diagnose_performance as diagnose_performance
from .diagnosis.result import PerformanceDiagnosis as PerformanceDiagnosis
from .diagnosis.result import PerformanceIssue as PerformanceIssue
from .exporters.cloud_monitoring import CloudMonitoringExporter as CloudMonitoringExporter
from .exporters.files import JsonlExporter as JsonlExporter
from .exporters.files import TensorBoardExporter as TensorBoardExporter
from .exporters.prometheus import PrometheusExporter as PrometheusExporter
from .memory_watch import watch as watch
from .monitor.cloud_monitor import TpuMonitor as TpuMonitor
from .monitor.collector import MetricsCollector as MetricsCollector
from .monitor.current import CurrentMetrics as CurrentMetrics
from .monitor.monitor import MonitorHook as MonitorHook
from .monitor.monitor import TPUMonitor as TPUMonitor
from .profiling.analysis import BottleneckAnalysis as BottleneckAnalysis
from .profiling.comparison import StepComparison as StepComparison
from .profiling.profiler import TPUProfiler as TPUProfiler
from .profiling.tracing import DeviceUsage as DeviceUsage
from .profiling.tracing import profile_tpu_usage as profile_tpu_usage
from .readings import METRICS as METRICS
from .readings import Reading as Reading
from .readings import Sample as Sample
from .runs.goodput import RunGoodput as RunGoodput
from .runs.run import Run as Run
from .runs.run import find_runs as find_runs
from .runs.series import Series as Series
from .runs.summary import RunSummary as RunSummary
from .stragglers.comparison import Straggler as Straggler
from .stragglers.comparison import StragglerReport as StragglerReport
from .stragglers.detection import HostRecords as HostRecords
from .stragglers.detection import detect_stragglers as detect_stragglers

__all__ = [
    "METRICS",
    "Alert",
    "AlertRule",
    "BottleneckAnalysis",
    "Bottlenecks",
    "CloudMonitoringExporter",
    "CurrentMetrics",
    "DeviceUsage",
    "HostRecords",
    "InputRate",
    "JsonlExporter",
    "MetricsCollector",
    "MonitorHook",
    "PerformanceDiagnosis",
    "PerformanceIssue",
    "PrometheusExporter",
    "Reading",
    "Run",
    "RunGoodput",
    "RunSummary",
    "Sample",
    "Series",
    "StepComparison",
    "StepTiming",
    "Straggler",
    "StragglerReport",
    "TPUMonitor",
    "TPUProfiler",
    "TensorBoardExporter",
    "TpuMonitor",
    "detect_stragglers",
    "diagnose_performance",
    "find_runs",
    "measure_input",
    "profile_tpu_usage",
    "time_steps",
    "watch",
]
