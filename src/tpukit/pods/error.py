"""What can go wrong with a pod, where document 004 imports it from; `tpukit.errors` is its home."""

from ..errors import CommunicationTimeout as CommunicationTimeout
from ..errors import OutOfMemory as OutOfMemory
from ..errors import PodUnavailable as PodUnavailable
from ..errors import ProviderError as ProviderError
from ..errors import TpuError as TpuError
from ..errors import TpuResult as TpuResult

__all__ = [
    "CommunicationTimeout",
    "OutOfMemory",
    "PodUnavailable",
    "ProviderError",
    "TpuError",
    "TpuResult",
]
