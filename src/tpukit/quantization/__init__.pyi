# Written by `make format` from the list in __init__.py.

from .cache.codebooks import fit_cache as fit_cache
from .cache.codebooks import load_cache as load_cache
from .cache.codebooks import save_cache as save_cache
from .cache.retention import CacheReport as CacheReport
from .cache.retention import measure_cache as measure_cache
from .codebooks.codebook import Codebook as Codebook
from .codebooks.codebook import FitReport as FitReport
from .codebooks.codebook_training import train_codebook as train_codebook
from .files.array_files import load_arrays as load_arrays
from .files.array_files import load_codebook as load_codebook
from .files.array_files import save_arrays as save_arrays
from .files.array_files import save_codebook as save_codebook
from .files.model_files import SavedModel as SavedModel
from .files.model_files import load_quantized as load_quantized
from .files.model_files import save_quantized as save_quantized
from .formats import VQ_FORMATS as VQ_FORMATS
from .formats import VQFormat as VQFormat
from .formats import parse_vq_format as parse_vq_format
from .integration import TPUv6VQIntegration as TPUv6VQIntegration
from .measures.evaluation import Measured as Measured
from .measures.evaluation import QuantizationEvaluation as QuantizationEvaluation
from .model import QuantizedModel as QuantizedModel
from .plan import QuantPlan as QuantPlan
from .published import QuantizedCheckpoint as QuantizedCheckpoint
from .published import read_quantized as read_quantized
from .quantizing import QuantizationResult as QuantizationResult
from .quantizing import quantize_model as quantize_model
from .report import MatrixRow as MatrixRow
from .report import QuantReport as QuantReport
from .search.tuning import TuningReport as TuningReport
from .search.tuning import tune_parameters as tune_parameters
from .uniform import quantize_for_tpu as quantize_for_tpu
from .vector_codes.codec import check_weight_metric as check_weight_metric
from .vector_codes.codec import output_error as output_error
from .vector_codes.codec import quantize_matrix as quantize_matrix
from .vector_codes.vq_array import VQArray as VQArray
from .vector_codes.vq_array import array_shardings as array_shardings
from .vector_codes.vq_array import place_array as place_array

__all__ = [
    "VQ_FORMATS",
    "CacheReport",
    "Codebook",
    "FitReport",
    "MatrixRow",
    "Measured",
    "QuantPlan",
    "QuantReport",
    "QuantizationEvaluation",
    "QuantizationResult",
    "QuantizedCheckpoint",
    "QuantizedModel",
    "SavedModel",
    "TPUv6VQIntegration",
    "TuningReport",
    "VQArray",
    "VQFormat",
    "array_shardings",
    "check_weight_metric",
    "fit_cache",
    "load_arrays",
    "load_cache",
    "load_codebook",
    "load_quantized",
    "measure_cache",
    "output_error",
    "parse_vq_format",
    "place_array",
    "quantize_for_tpu",
    "quantize_matrix",
    "quantize_model",
    "read_quantized",
    "save_arrays",
    "save_cache",
    "save_codebook",
    "save_quantized",
    "train_codebook",
    "tune_parameters",
]
