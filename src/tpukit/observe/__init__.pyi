# Written by `make format` from the list in __init__.py.

from .diagnosis.evidence import Bottlenecks as Bottlenecks
from .diagnosis.input_rate import InputRate as InputRate
from .diagnosis.input_rate import measure_input as measure_input
from .diagnosis.issues import PerformanceIssue as PerformanceIssue
from .diagnosis.performance import diagnose_performance as diagnose_performance
from .diagnosis.result import PerformanceDiagnosis as PerformanceDiagnosis
from .diagnosis.step_timing import StepTiming as StepTiming
from .diagnosis.step_timing import time_steps as time_steps
from .memory_watch import watch as watch
from .profiling.analysis import BottleneckAnalysis as BottleneckAnalysis
from .profiling.comparison import StepComparison as StepComparison
from .profiling.profiler import TPUProfiler as TPUProfiler
from .profiling.usage import DeviceUsage as DeviceUsage
from .profiling.usage import profile_tpu_usage as profile_tpu_usage
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
    "BottleneckAnalysis",
    "Bottlenecks",
    "DeviceUsage",
    "HostRecords",
    "InputRate",
    "PerformanceDiagnosis",
    "PerformanceIssue",
    "Run",
    "RunGoodput",
    "RunSummary",
    "Series",
    "StepComparison",
    "StepTiming",
    "Straggler",
    "StragglerReport",
    "TPUProfiler",
    "detect_stragglers",
    "diagnose_performance",
    "find_runs",
    "measure_input",
    "profile_tpu_usage",
    "time_steps",
    "watch",
]
