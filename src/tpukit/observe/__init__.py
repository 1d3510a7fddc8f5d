"""What reads runs and programs: diagnosis and profiler, and later monitor and dashboard."""

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
    ".profiling.analysis": ("BottleneckAnalysis",),
    ".profiling.comparison": ("StepComparison",),
    ".profiling.profiler": ("TPUProfiler",),
    ".profiling.usage": (
        "DeviceUsage",
        "profile_tpu_usage",
    ),
    ".runs.goodput": ("RunGoodput",),
    ".runs.run": (
        "Run",
        "find_runs",
    ),
    ".runs.series": ("Series",),
    ".runs.summary": ("RunSummary",),
    ".stragglers.detection": (
        "HostRecords",
        "detect_stragglers",
    ),
    ".stragglers.report": (
        "Straggler",
        "StragglerReport",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
