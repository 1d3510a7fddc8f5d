"""What reads runs, chips and programs: monitor, alerts, exporters, profiler, runs, diagnosis."""

from ..lazy import lazy_names

HOMES = {
    ".alerts": ("Alert", "AlertRule"),
    ".diagnosis.evidence": (
        "Bottlenecks",
        "InputRate",
        "StepTiming",
        "measure_input",
        "time_steps",
    ),
    ".diagnosis.performance": ("diagnose_performance",),
    ".diagnosis.result": ("PerformanceDiagnosis", "PerformanceIssue"),
    ".exporters.cloud_monitoring": ("CloudMonitoringExporter",),
    ".exporters.files": ("JsonlExporter", "TensorBoardExporter"),
    ".exporters.prometheus": ("PrometheusExporter",),
    ".memory_watch": ("watch",),
    ".profiling.analysis": ("BottleneckAnalysis",),
    ".profiling.comparison": ("StepComparison",),
    ".profiling.profiler": ("TPUProfiler",),
    ".profiling.tracing": ("DeviceUsage", "profile_tpu_usage"),
    ".monitor.cloud_monitor": ("TpuMonitor",),
    ".monitor.collector": ("MetricsCollector",),
    ".monitor.current": ("CurrentMetrics",),
    ".monitor.monitor": ("MonitorHook", "TPUMonitor"),
    ".readings": ("METRICS", "Reading", "Sample"),
    ".runs.goodput": ("RunGoodput",),
    ".runs.run": ("Run", "find_runs"),
    ".runs.series": ("Series",),
    ".runs.summary": ("RunSummary",),
    ".stragglers.comparison": ("Straggler", "StragglerReport"),
    ".stragglers.detection": ("HostRecords", "detect_stragglers"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
