"""tpukit: from a laptop to a TPU pod.

Public names load on first use, so `import tpukit` is fast, silent and imports neither jax
nor torch. Kernels, PyTorch and pods have names of their own in `tpukit.kernels`, `tpukit.torch`
and `tpukit.pods`.
"""

from .lazy import lazy_names

__version__ = "0.1.0"

HOMES = {
    ".checker.captured": ("capture", "check_program"),
    ".checker.check": ("check",),
    ".checker.decoding": ("DecodingCheck", "check_decoding"),
    ".checker.flag_tuning.search": ("tune_flags",),
    ".checker.result": ("CheckResult",),
    ".compiler": ("CompiledStep", "compile_for", "load_executable", "save_executable"),
    ".errors": ("TPUError",),
    ".hardware": (
        *("Chip", "Figure", "PriceBook", "Slice", "detect_accelerators", "get_chip"),
        *("list_chips", "list_slices", "public_prices"),
    ),
    ".job": ("Job", "TPUConfig", "TrainingSettings"),
    ".kernels": ("adaptive_matmul",),
    ".models": (
        *("RematPolicy", "Transformer", "TransformerConfig", "enable_gradient_checkpointing"),
        *("export_huggingface", "get_preset", "import_huggingface", "list_presets"),
    ),
    ".models.generation": ("Generator", "Sampling", "generate"),
    ".observe": (
        *("TPUMonitor", "TPUProfiler", "TpuMonitor", "diagnose_performance"),
        "profile_tpu_usage",
    ),
    ".parallel": (
        *("Layout", "MeshConfig", "abstract_mesh", "create_mesh", "detect_hotspots"),
        *("get_sharding_spec", "make_layout", "optimize_sharding", "reshard", "shard_model"),
        "validate_sharding",
    ),
    ".planner.answer.result": ("PlanResult",),
    ".planner.planning": ("plan",),
    ".planner.published_verdict": ("quantization_verdict",),
    ".planner.serving": ("plan_serving",),
    ".planner.batch_size": ("find_optimal_batch_size",),
    ".planner.memory_optimizer": ("MemoryOptimizer",),
    ".quantization": ("TPUv6VQIntegration", "quantize_for_tpu"),
    ".rehearsal.rehearse": ("rehearse",),
    ".rehearsal.result": ("RehearsalResult",),
    ".runtime.doctor": ("diagnose_tpu",),
    ".runtime.environment": ("configure_tpu_environment",),
    ".runtime.flags": ("FlagRegistry", "enable_xla_optimizations", "set_xla_flags"),
    ".runtime.logs": ("setup_logging",),
    ".runtime.multihost": ("MultiHostConfig",),
    ".step": ("Workload",),
    ".training": ("TPUCheckpointer", "TPUTrainer", "TrainingResult", "open_data"),
    ".training.export": ("export_run",),
    ".training.trained_model": ("load_trained",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
