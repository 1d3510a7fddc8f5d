# Written by `make format` from the list in __init__.py.

from .checker.captured import capture as capture
from .checker.captured import check_program as check_program
from .checker.check import check as check
from .checker.decoding import DecodingCheck as DecodingCheck
from .checker.decoding import check_decoding as check_decoding
from .checker.flag_tuning.search import tune_flags as tune_flags
from .checker.result import CheckResult as CheckResult
from .compiler import CompiledStep as CompiledStep
from .compiler import compile_for as compile_for
from .compiler import load_executable as load_executable
from .compiler import save_executable as save_executable
from .errors import TPUError as TPUError
from .hardware import Chip as Chip
from .hardware import Figure as Figure
from .hardware import PriceBook as PriceBook
from .hardware import Slice as Slice
from .hardware import detect_accelerators as detect_accelerators
from .hardware import get_chip as get_chip
from .hardware import list_chips as list_chips
from .hardware import list_slices as list_slices
from .hardware import public_prices as public_prices
from .job import Job as Job
from .job import TPUConfig as TPUConfig
from .job import TrainingSettings as TrainingSettings
from .kernels import adaptive_matmul as adaptive_matmul
from .models import RematPolicy as RematPolicy
from .models import Transformer as Transformer
from .models import TransformerConfig as TransformerConfig
from .models import enable_gradient_checkpointing as enable_gradient_checkpointing
from .models import export_huggingface as export_huggingface
from .models import get_preset as get_preset
from .models import import_huggingface as import_huggingface
from .models import list_presets as list_presets
from .models.generation import Generator as Generator
from .models.generation import Sampling as Sampling
from .models.generation import generate as generate
from .observe import TPUMonitor as TPUMonitor
from .observe import TpuMonitor as TpuMonitor
from .observe import TPUProfiler as TPUProfiler
from .observe import diagnose_performance as diagnose_performance
from .observe import profile_tpu_usage as profile_tpu_usage
from .parallel import Layout as Layout
from .parallel import MeshConfig as MeshConfig
from .parallel import abstract_mesh as abstract_mesh
from .parallel import create_mesh as create_mesh
from .parallel import detect_hotspots as detect_hotspots
from .parallel import get_sharding_spec as get_sharding_spec
from .parallel import make_layout as make_layout
from .parallel import optimize_sharding as optimize_sharding
from .parallel import reshard as reshard
from .parallel import shard_model as shard_model
from .parallel import validate_sharding as validate_sharding
from .planner.answer.result import PlanResult as PlanResult
from .planner.batch_size import find_optimal_batch_size as find_optimal_batch_size
from .planner.memory_optimizer import MemoryOptimizer as MemoryOptimizer
from .planner.planning import plan as plan
from .planner.published_verdict import quantization_verdict as quantization_verdict
from .planner.serving import plan_serving as plan_serving
from .quantization import TPUv6VQIntegration as TPUv6VQIntegration
from .quantization import quantize_for_tpu as quantize_for_tpu
from .rehearsal.rehearse import rehearse as rehearse
from .rehearsal.result import RehearsalResult as RehearsalResult
from .runtime.doctor import diagnose_tpu as diagnose_tpu
from .runtime.environment import configure_tpu_environment as configure_tpu_environment
from .runtime.flags import FlagRegistry as FlagRegistry
from .runtime.flags import enable_xla_optimizations as enable_xla_optimizations
from .runtime.flags import set_xla_flags as set_xla_flags
from .runtime.logs import setup_logging as setup_logging
from .runtime.multihost import MultiHostConfig as MultiHostConfig
from .step import Workload as Workload
from .training import TPUCheckpointer as TPUCheckpointer
from .training import TPUTrainer as TPUTrainer
from .training import TrainingResult as TrainingResult
from .training import open_data as open_data
from .training.export import export_run as export_run
from .training.trained_model import load_trained as load_trained

__all__ = [
    "CheckResult",
    "Chip",
    "CompiledStep",
    "DecodingCheck",
    "Figure",
    "FlagRegistry",
    "Generator",
    "Job",
    "Layout",
    "MemoryOptimizer",
    "MeshConfig",
    "MultiHostConfig",
    "PlanResult",
    "PriceBook",
    "RehearsalResult",
    "RematPolicy",
    "Sampling",
    "Slice",
    "TPUCheckpointer",
    "TPUConfig",
    "TPUError",
    "TPUMonitor",
    "TPUProfiler",
    "TPUTrainer",
    "TPUv6VQIntegration",
    "TpuMonitor",
    "TrainingResult",
    "TrainingSettings",
    "Transformer",
    "TransformerConfig",
    "Workload",
    "abstract_mesh",
    "adaptive_matmul",
    "capture",
    "check",
    "check_decoding",
    "check_program",
    "compile_for",
    "configure_tpu_environment",
    "create_mesh",
    "detect_accelerators",
    "detect_hotspots",
    "diagnose_performance",
    "diagnose_tpu",
    "enable_gradient_checkpointing",
    "enable_xla_optimizations",
    "export_huggingface",
    "export_run",
    "find_optimal_batch_size",
    "generate",
    "get_chip",
    "get_preset",
    "get_sharding_spec",
    "import_huggingface",
    "list_chips",
    "list_presets",
    "list_slices",
    "load_executable",
    "load_trained",
    "make_layout",
    "open_data",
    "optimize_sharding",
    "plan",
    "plan_serving",
    "profile_tpu_usage",
    "public_prices",
    "quantization_verdict",
    "quantize_for_tpu",
    "rehearse",
    "reshard",
    "save_executable",
    "set_xla_flags",
    "setup_logging",
    "shard_model",
    "tune_flags",
    "validate_sharding",
]

__version__: str
