# Written by `make format` from the list in __init__.py.

from ..errors import CommunicationTimeout as CommunicationTimeout
from ..errors import OutOfMemory as OutOfMemory
from ..errors import PodUnavailable as PodUnavailable
from ..errors import ProviderError as ProviderError
from ..errors import TPUError as TPUError
from ..records.reporting import report_step as report_step
from .causes import Cause as Cause
from .causes import Ending as Ending
from .causes import Kind as Kind
from .config import PodConfig as PodConfig
from .health import PodHealth as PodHealth
from .launching.launch import launch as launch
from .manager import TpuManager as TpuManager
from .pod import Host as Host
from .pod import Pod as Pod
from .pod import PodState as PodState
from .pod import Tier as Tier
from .preemptible import PreemptibleManager as PreemptibleManager
from .providers.protocol import Capabilities as Capabilities
from .providers.protocol import Command as Command
from .providers.protocol import Gang as Gang
from .providers.protocol import Provider as Provider
from .providers.registry import open_provider as open_provider
from .reconciler import Reconciler as Reconciler
from .store import Store as Store
from .supervision.journal import Attempt as Attempt
from .supervision.journal import Journal as Journal
from .supervision.journal import MemoryJournal as MemoryJournal
from .supervision.outcome import Outcome as Outcome
from .supervision.policy import Policy as Policy
from .supervision.preemption import PreemptionHandler as PreemptionHandler
from .supervision.supervisor import Supervisor as Supervisor
from .tpu_config import TpuConfig as TpuConfig

__all__ = [
    "Attempt",
    "Capabilities",
    "Cause",
    "Command",
    "CommunicationTimeout",
    "Ending",
    "Gang",
    "Host",
    "Journal",
    "Kind",
    "MemoryJournal",
    "OutOfMemory",
    "Outcome",
    "Pod",
    "PodConfig",
    "PodHealth",
    "PodState",
    "PodUnavailable",
    "Policy",
    "PreemptibleManager",
    "PreemptionHandler",
    "Provider",
    "ProviderError",
    "Reconciler",
    "Store",
    "Supervisor",
    "TPUError",
    "Tier",
    "TpuConfig",
    "TpuManager",
    "launch",
    "open_provider",
    "report_step",
]
