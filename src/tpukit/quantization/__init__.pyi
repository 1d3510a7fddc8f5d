# Written by `make format` from the list in __init__.py.

from .codebook import Codebook as Codebook
from .codebook import FitReport as FitReport
from .codebook_training import train_codebook as train_codebook
from .codec import check_weight_metric as check_weight_metric
from .codec import output_error as output_error
from .codec import quantize_matrix as quantize_matrix
from .files import load_arrays as load_arrays
from .files import load_codebook as load_codebook
from .files import save_arrays as save_arrays
from .files import save_codebook as save_codebook
from .formats import VQ_FORMATS as VQ_FORMATS
from .formats import VQFormat as VQFormat
from .formats import parse_vq_format as parse_vq_format
from .integration import TPUv6VQIntegration as TPUv6VQIntegration
from .placement import array_shardings as array_shardings
from .placement import place_array as place_array
from .vq_array import VQArray as VQArray

__all__ = [
    "VQ_FORMATS",
    "Codebook",
    "FitReport",
    "TPUv6VQIntegration",
    "VQArray",
    "VQFormat",
    "array_shardings",
    "check_weight_metric",
    "load_arrays",
    "load_codebook",
    "output_error",
    "parse_vq_format",
    "place_array",
    "quantize_matrix",
    "save_arrays",
    "save_codebook",
    "train_codebook",
]
