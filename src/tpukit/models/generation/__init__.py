"""Sampling from the reference transformers, with a cache of keys and values."""

from .cache import CacheSpec as CacheSpec
from .decoding import Sampling as Sampling
from .generator import Generator as Generator
from .generator import generate as generate
from .result import Generation as Generation
from .text import TextPart as TextPart
from .text import stream_text as stream_text
