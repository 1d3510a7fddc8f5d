# Written by `make format` from the list in __init__.py.

from ..errors import CommunicationTimeout as CommunicationTimeout
from ..errors import OutOfMemory as OutOfMemory
from ..errors import PodUnavailable as PodUnavailable
from ..errors import ProviderError as ProviderError
from ..errors import TPUError as TPUError
from ..errors import TpuError as TpuError
from ..errors import TpuResult as TpuResult
from ..observe.stragglers.comparison import Stragglers as Stragglers
from ..observe.stragglers.comparison import find_stragglers as find_stragglers
from ..records.reporting import report_step as report_step
from .causes import Cause as Cause
from .causes import Ending as Ending
from .causes import Kind as Kind
from .config import PodConfig as PodConfig
from .config import TpuConfig as TpuConfig
from .launching.launch import launch as launch
from .manager import PodHealth as PodHealth
from .manager import TpuManager as TpuManager
from .multipod.manager import MultiPodManager as MultiPodManager
from .multipod.sums import AllReduceStrategy as AllReduceStrategy
from .multipod.sums import PodTopology as PodTopology
from .multipod.training import MultiPod as MultiPod
from .multipod.training import SynchronizedStep as SynchronizedStep
from .optimizer.hosts import balance_examples as balance_examples
from .optimizer.optimizer import DistributedTensor as DistributedTensor
from .optimizer.optimizer import StepMetrics as StepMetrics
from .optimizer.optimizer import TpuOptimizer as TpuOptimizer
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
from .scaling.applying import JobScaling as JobScaling
from .scaling.autoscaler import AutoScaler as AutoScaler
from .scaling.autoscaler import ScalingDecision as ScalingDecision
from .scaling.autoscaler import ScalingPolicy as ScalingPolicy
from .scaling.metrics import WorkloadMetrics as WorkloadMetrics
from .spot.manager import SpotManager as SpotManager
from .spot.ranking import BiddingStrategy as BiddingStrategy
from .spot.ranking import ZoneRanking as ZoneRanking
from .store import PodLife as PodLife
from .store import PodLives as PodLives
from .store import Store as Store
from .supervision.journal import Attempt as Attempt
from .supervision.journal import Journal as Journal
from .supervision.journal import MemoryJournal as MemoryJournal
from .supervision.policy import Policy as Policy
from .supervision.policy import PreemptionHandler as PreemptionHandler
from .supervision.supervisor import Outcome as Outcome
from .supervision.supervisor import Supervisor as Supervisor
from .xla import OptimizationFlags as OptimizationFlags
from .xla import OptimizedGraph as OptimizedGraph
from .xla import OptimizerConfig as OptimizerConfig
from .xla import XlaCompiler as XlaCompiler

__all__ = [
    "AllReduceStrategy",
    "Attempt",
    "AutoScaler",
    "BiddingStrategy",
    "Capabilities",
    "Cause",
    "Command",
    "CommunicationTimeout",
    "DistributedTensor",
    "Ending",
    "Gang",
    "Host",
    "JobScaling",
    "Journal",
    "Kind",
    "MemoryJournal",
    "MultiPod",
    "MultiPodManager",
    "OptimizationFlags",
    "OptimizedGraph",
    "OptimizerConfig",
    "OutOfMemory",
    "Outcome",
    "Pod",
    "PodConfig",
    "PodHealth",
    "PodLife",
    "PodLives",
    "PodState",
    "PodTopology",
    "PodUnavailable",
    "Policy",
    "PreemptibleManager",
    "PreemptionHandler",
    "Provider",
    "ProviderError",
    "Reconciler",
    "ScalingDecision",
    "ScalingPolicy",
    "SpotManager",
    "StepMetrics",
    "Store",
    "Stragglers",
    "Supervisor",
    "SynchronizedStep",
    "TPUError",
    "Tier",
    "TpuConfig",
    "TpuError",
    "TpuManager",
    "TpuOptimizer",
    "TpuResult",
    "WorkloadMetrics",
    "XlaCompiler",
    "ZoneRanking",
    "balance_examples",
    "find_stragglers",
    "launch",
    "open_provider",
    "report_step",
]
