"""Pods: get chips, keep them, lose nothing when they vanish, spend the least (document 004)."""

from ..lazy import lazy_names

HOMES = {
    ".causes": ("Cause", "Ending", "Kind"),
    ".config": ("PodConfig",),
    ".health": ("PodHealth",),
    ".launching.launch": ("launch",),
    ".manager": ("TpuManager",),
    ".preemptible": ("PreemptibleManager",),
    ".reconciler": ("Reconciler",),
    ".store": ("Store",),
    ".tpu_config": ("TpuConfig",),
    ".pod": ("Host", "Pod", "PodState", "Tier"),
    ".providers.protocol": ("Capabilities", "Command", "Gang", "Provider"),
    ".providers.registry": ("open_provider",),
    ".supervision.journal": ("Attempt", "Journal", "MemoryJournal"),
    ".supervision.outcome": ("Outcome",),
    ".supervision.policy": ("Policy",),
    ".supervision.preemption": ("PreemptionHandler",),
    ".supervision.supervisor": ("Supervisor",),
    "..records.reporting": ("report_step",),
    "..errors": (
        *("CommunicationTimeout", "OutOfMemory", "PodUnavailable", "ProviderError", "TPUError"),
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
