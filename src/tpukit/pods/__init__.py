"""Get TPU pods, keep them, recover when they are preempted, and limit their cost (document 004)."""

from ..lazy import lazy_names

HOMES = {
    ".causes": ("Cause", "Ending", "Kind"),
    ".config": ("PodConfig", "TpuConfig"),
    ".launching.launch": ("launch",),
    ".manager": ("PodHealth", "TpuManager"),
    ".multipod.manager": ("MultiPodManager",),
    ".multipod.sums": ("AllReduceStrategy", "PodTopology"),
    ".multipod.training": ("MultiPod", "SynchronizedStep"),
    "..observe.stragglers.comparison": ("Stragglers", "find_stragglers"),
    ".optimizer.hosts": ("balance_examples",),
    ".optimizer.optimizer": ("DistributedTensor", "StepMetrics", "TpuOptimizer"),
    ".pod": ("Host", "Pod", "PodState", "Tier"),
    ".preemptible": ("PreemptibleManager",),
    ".providers.protocol": ("Capabilities", "Command", "Gang", "Provider"),
    ".providers.registry": ("open_provider",),
    ".reconciler": ("Reconciler",),
    "..records.reporting": ("report_step",),
    ".scaling.applying": ("JobScaling",),
    ".scaling.autoscaler": ("AutoScaler", "ScalingDecision", "ScalingPolicy"),
    ".scaling.metrics": ("WorkloadMetrics",),
    ".spot.manager": ("SpotManager",),
    ".spot.ranking": ("BiddingStrategy", "ZoneRanking"),
    ".store": ("PodLife", "PodLives", "Store"),
    ".supervision.journal": ("Attempt", "Journal", "MemoryJournal"),
    ".supervision.policy": ("Policy", "PreemptionHandler"),
    ".supervision.supervisor": ("Outcome", "Supervisor"),
    ".xla": ("OptimizationFlags", "OptimizedGraph", "OptimizerConfig", "XlaCompiler"),
    "..errors": (
        *("CommunicationTimeout", "OutOfMemory", "PodUnavailable", "ProviderError", "TPUError"),
        *("TpuError", "TpuResult"),
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
