"""What reads runs, chips and programs: monitor, alerts, exporters, profiler, runs, diagnosis."""

from ..lazy import lazy_names

HOMES = {
    ".alerts": ("Alert", "AlertRule"),
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
    ".exporters.cloud_monitoring": ("CloudMonitoringExporter",),
    ".exporters.jsonl": ("JsonlExporter",),
    ".exporters.prometheus": ("PrometheusExporter",),
    ".exporters.tensorboard": ("TensorBoardExporter",),
    ".memory_watch": ("watch",),
    ".profiling.analysis": ("BottleneckAnalysis",),
    ".profiling.comparison": ("StepComparison",),
    ".profiling.profiler": ("TPUProfiler",),
    ".profiling.usage": (
        "DeviceUsage",
        "profile_tpu_usage",
    ),
    ".monitor.cloud_monitor": ("TpuMonitor",),
    ".monitor.collector": ("MetricsCollector",),
    ".monitor.current": ("CurrentMetrics",),
    ".monitor.hook": ("MonitorHook",),
    ".monitor.monitor": ("TPUMonitor",),
    ".readings": ("METRICS", "Reading", "Sample"),
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
