"""The verdict on generation: prefill and decode through the compiler."""

from .checking import check_decoding as check_decoding
from .result import DecodingCheck as DecodingCheck
