"""Training data: files, buckets, text or iterables as batches, in a resumable order."""

from .inspection import Inspection as Inspection
from .inspection import inspect_data as inspect_data
from .opening import TokenData as TokenData
from .opening import open_data as open_data
from .opening import open_tokens as open_tokens
from .prepare import Prepared as Prepared
from .prepare import prepare_tokens as prepare_tokens
from .stream import DataDescription as DataDescription
from .stream import DataStream as DataStream
from .token_store import TokenStore as TokenStore
from .tokenizer import ByteTokenizer as ByteTokenizer
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import load_tokenizer as load_tokenizer

__all__ = [
    "ByteTokenizer",
    "DataDescription",
    "DataStream",
    "Inspection",
    "Prepared",
    "TokenData",
    "TokenStore",
    "Tokenizer",
    "inspect_data",
    "load_tokenizer",
    "open_data",
    "open_tokens",
    "prepare_tokens",
]
