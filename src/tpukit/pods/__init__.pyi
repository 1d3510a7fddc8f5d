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
from .health import PodHealth as PodHealth
from .launching.launch import launch as launch
from .manager import TpuManager as TpuManager
from .multipod.manager import MultiPodManager as MultiPodManager
from .multipod.result import SynchronizedStep as SynchronizedStep
from .multipod.strategy import AllReduceStrategy as AllReduceStrategy
from .multipod.strategy import PodTopology as PodTopology
from .multipod.training import MultiPod as MultiPod
from .optimizer.balance import balance_examples as balance_examples
from .optimizer.metrics import StepMetrics as StepMetrics
from .optimizer.optimizer import TpuOptimizer as TpuOptimizer
from .optimizer.tensor import DistributedTensor as DistributedTensor
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
from .scaling.decision import ScalingDecision as ScalingDecision
from .scaling.metrics import WorkloadMetrics as WorkloadMetrics
from .scaling.policy import ScalingPolicy as ScalingPolicy
from .spot.life import PodLife as PodLife
from .spot.life import PodLives as PodLives
from .spot.manager import SpotManager as SpotManager
from .spot.ranking import ZoneRanking as ZoneRanking
from .spot.strategy import BiddingStrategy as BiddingStrategy
from .store import Store as Store
from .supervision.journal import Attempt as Attempt
from .supervision.journal import Journal as Journal
from .supervision.journal import MemoryJournal as MemoryJournal
from .supervision.outcome import Outcome as Outcome
from .supervision.policy import Policy as Policy
from .supervision.preemption import PreemptionHandler as PreemptionHandler
from .supervision.supervisor import Supervisor as Supervisor
from .tpu_config import TpuConfig as TpuConfig
from .xla.compiler import OptimizedGraph as OptimizedGraph
from .xla.compiler import OptimizerConfig as OptimizerConfig
from .xla.compiler import XlaCompiler as XlaCompiler
from .xla.flags import OptimizationFlags as OptimizationFlags

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
