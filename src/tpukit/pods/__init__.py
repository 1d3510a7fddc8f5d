"""Pods: get chips, keep them, lose nothing when they vanish, spend the least (document 004)."""

from ..lazy import lazy_names

HOMES = {
    ".causes": ("Cause", "Ending", "Kind"),
    ".config": ("PodConfig",),
    ".health": ("PodHealth",),
    ".launching.launch": ("launch",),
    ".manager": ("TpuManager",),
    ".multipod.manager": ("MultiPodManager",),
    ".multipod.result": ("SynchronizedStep",),
    ".multipod.strategy": ("AllReduceStrategy", "PodTopology"),
    ".multipod.training": ("MultiPod",),
    ".optimizer.balance": ("Stragglers", "balance_examples", "find_stragglers"),
    ".optimizer.metrics": ("StepMetrics",),
    ".optimizer.optimizer": ("TpuOptimizer",),
    ".optimizer.tensor": ("DistributedTensor",),
    ".pod": ("Host", "Pod", "PodState", "Tier"),
    ".preemptible": ("PreemptibleManager",),
    ".providers.protocol": ("Capabilities", "Command", "Gang", "Provider"),
    ".providers.registry": ("open_provider",),
    ".reconciler": ("Reconciler",),
    "..records.reporting": ("report_step",),
    ".scaling.autoscaler": ("AutoScaler",),
    ".scaling.decision": ("ScalingDecision",),
    ".scaling.metrics": ("WorkloadMetrics",),
    ".scaling.policy": ("ScalingPolicy",),
    ".spot.life": ("PodLife", "PodLives"),
    ".spot.manager": ("SpotManager",),
    ".spot.ranking": ("ZoneRanking",),
    ".spot.strategy": ("BiddingStrategy",),
    ".store": ("Store",),
    ".supervision.journal": ("Attempt", "Journal", "MemoryJournal"),
    ".supervision.outcome": ("Outcome",),
    ".supervision.policy": ("Policy",),
    ".supervision.preemption": ("PreemptionHandler",),
    ".supervision.supervisor": ("Supervisor",),
    ".tpu_config": ("TpuConfig",),
    ".xla.compiler": ("OptimizedGraph", "OptimizerConfig", "XlaCompiler"),
    ".xla.flags": ("OptimizationFlags",),
    "..errors": (
        *("CommunicationTimeout", "OutOfMemory", "PodUnavailable", "ProviderError", "TPUError"),
        "TpuError",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
