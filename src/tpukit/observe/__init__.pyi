# Written by `make format` from the list in __init__.py.

from .alerts import Alert as Alert
from .alerts import AlertRule as AlertRule
from .diagnosis.evidence import Bottlenecks as Bottlenecks
from .diagnosis.input_rate import InputRate as InputRate
from .diagnosis.input_rate import measure_input as measure_input
from .diagnosis.issues import PerformanceIssue as PerformanceIssue
from .diagnosis.performance import diagnose_performance as diagnose_performance
from .diagnosis.result import PerformanceDiagnosis as PerformanceDiagnosis
from .diagnosis.step_timing import StepTiming as StepTiming
from .diagnosis.step_timing import time_steps as time_steps
from .exporters.cloud_monitoring import CloudMonitoringExporter as CloudMonitoringExporter
from .exporters.jsonl import JsonlExporter as JsonlExporter
from .exporters.prometheus import PrometheusExporter as PrometheusExporter
from .exporters.tensorboard import TensorBoardExporter as TensorBoardExporter
from .memory_watch import watch as watch
from .monitor.cloud_monitor import TpuMonitor as TpuMonitor
from .monitor.collector import MetricsCollector as MetricsCollector
from .monitor.current import CurrentMetrics as CurrentMetrics
from .monitor.hook import MonitorHook as MonitorHook
from .monitor.monitor import TPUMonitor as TPUMonitor
from .profiling.analysis import BottleneckAnalysis as BottleneckAnalysis
from .profiling.comparison import StepComparison as StepComparison
from .profiling.profiler import TPUProfiler as TPUProfiler
from .profiling.usage import DeviceUsage as DeviceUsage
from .profiling.usage import profile_tpu_usage as profile_tpu_usage
from .readings import METRICS as METRICS
from .readings import Reading as Reading
from .readings import Sample as Sample
from .runs.goodput import RunGoodput as RunGoodput
from .runs.run import Run as Run
from .runs.run import find_runs as find_runs
from .runs.series import Series as Series
from .runs.summary import RunSummary as RunSummary
from .stragglers.detection import HostRecords as HostRecords
from .stragglers.detection import detect_stragglers as detect_stragglers
from .stragglers.report import Straggler as Straggler
from .stragglers.report import StragglerReport as StragglerReport

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
