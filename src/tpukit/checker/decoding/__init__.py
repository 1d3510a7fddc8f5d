"""Check prefill and decode of generation with the compiler."""

from .checking import check_decoding as check_decoding
from .result import DecodingCheck as DecodingCheck
