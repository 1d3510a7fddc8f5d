"""What reads runs and programs: diagnosis, and later monitor, profiler and dashboard."""

from ..lazy import lazy_names

HOMES = {
    ".diagnosis.evidence": ("Bottlenecks",),
    ".diagnosis.input_rate": (
        "InputRate",
        "measure_input",
    ),
    ".diagnosis.issues": ("PerformanceIssue",),
    ".diagnosis.performance": ("diagnose_performance",),
    ".diagnosis.result": ("PerformanceDiagnosis",),
    ".diagnosis.step_timing": (
        "StepTiming",
        "time_steps",
    ),
    ".memory_watch": ("watch",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
