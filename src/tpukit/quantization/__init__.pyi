# Written by `make format` from the list in __init__.py.

from .codebook import Codebook as Codebook
from .codebook import FitReport as FitReport
from .codebook_training import train_codebook as train_codebook
from .codec import output_error as output_error
from .codec import quantize_matrix as quantize_matrix
from .formats import VQ_FORMATS as VQ_FORMATS
from .formats import VQFormat as VQFormat
from .formats import parse_vq_format as parse_vq_format
from .published.checkpoint import QuantizedCheckpoint as QuantizedCheckpoint
from .published.checkpoint import read_quantized as read_quantized
from .vq_array import VQArray as VQArray

__all__ = [
    "VQ_FORMATS",
    "Codebook",
    "FitReport",
    "QuantizedCheckpoint",
    "VQArray",
    "VQFormat",
    "output_error",
    "parse_vq_format",
    "quantize_matrix",
    "read_quantized",
    "train_codebook",
]
