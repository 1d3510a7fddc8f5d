"""Errors of pods under document 004's module name; they are defined in `tpukit.errors`."""

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
