"""Text generation from reference transformers with a KV cache."""

from .cache import CacheSpec as CacheSpec
from .decoding import Sampling as Sampling
from .generator import Generation as Generation
from .generator import Generator as Generator
from .generator import generate as generate
from .text import TextPart as TextPart
from .text import stream_text as stream_text
