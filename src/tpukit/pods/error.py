"""What can go wrong with a pod, where document 004 imports it from; `tpukit.errors` is its home."""

from typing import Annotated, TypeVar

from ..errors import CommunicationTimeout as CommunicationTimeout
from ..errors import OutOfMemory as OutOfMemory
from ..errors import PodUnavailable as PodUnavailable
from ..errors import ProviderError as ProviderError
from ..errors import TpuError as TpuError

Value = TypeVar("Value")
# Rust returns an error, Python raises it: `TpuResult[float]` is a float, for signatures.
TpuResult = Annotated[Value, TpuError]

__all__ = [
    "CommunicationTimeout",
    "OutOfMemory",
    "PodUnavailable",
    "ProviderError",
    "TpuError",
    "TpuResult",
]
