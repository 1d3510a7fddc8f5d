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

__all__ = [
    "Bottlenecks",
    "InputRate",
    "PerformanceDiagnosis",
    "PerformanceIssue",
    "StepTiming",
    "diagnose_performance",
    "measure_input",
    "time_steps",
    "watch",
]
