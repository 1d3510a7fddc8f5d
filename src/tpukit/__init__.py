"""tpukit: from a laptop to a TPU pod.

Public names load on first use, so `import tpukit` is fast, silent and imports neither jax
nor torch.
"""

from .lazy import lazy_names

__version__ = "0.1.0"

HOMES = {
    ".checker.flag_tuning.search": ("tune_flags",),
    ".compiler": ("CompiledStep", "compile_for", "load_executable", "save_executable"),
    ".errors": ("TPUError",),
    ".hardware": (
        "Accelerators",
        "Chip",
        "Figure",
        "PriceBook",
        "Slice",
        "detect_accelerators",
        "get_chip",
        "list_chips",
        "list_slices",
        "public_prices",
    ),
    ".job.config": (
        "TPUConfig",
        "TPUVersion",
    ),
    ".job.job": ("Plan",),
    ".job.train": ("TrainingSettings",),
    ".kernels": (
        "PrecisionConfig",
        "adaptive_matmul",
        "register_tpu_op",
        "tpu_kernel",
    ),
    ".kernels.ops": ("flash_attention",),
    ".kernels.timing": ("estimate_kernel",),
    ".kernels.tuning": ("tune_op",),
    ".models": (
        "RematPolicy",
        "Transformer",
        "TransformerConfig",
        "enable_gradient_checkpointing",
        "export_huggingface",
        "get_preset",
        "import_huggingface",
        "list_presets",
    ),
    ".models.generation": (
        "Generator",
        "Sampling",
        "generate",
    ),
    ".observe": ("diagnose_performance",),
    ".parallel": (
        "Layout",
        "MeshConfig",
        "abstract_mesh",
        "create_mesh",
        "detect_hotspots",
        "get_sharding_spec",
        "make_layout",
        "optimize_sharding",
        "shard_model",
        "validate_sharding",
    ),
    ".parallel.rebalancing": ("reshard",),
    ".parallel.ring": ("attention",),
    ".planner.answer.result": ("PlanResult",),
    ".planner.planning": ("plan",),
    ".planner.serving": ("plan_serving",),
    ".planner.sizing.batch_size": ("find_optimal_batch_size",),
    ".planner.sizing.memory_optimizer": ("MemoryOptimizer",),
    ".runtime.doctor": (
        "Diagnosis",
        "diagnose_tpu",
    ),
    ".runtime.environment": (
        "EnvironmentReport",
        "configure_tpu_environment",
    ),
    ".runtime.flags": (
        "FlagRegistry",
        "enable_xla_optimizations",
        "set_xla_flags",
    ),
    ".runtime.logs": ("setup_logging",),
    ".runtime.multihost": ("MultiHostConfig",),
    ".step.workload": ("Workload",),
    ".training": (
        "ExitCode",
        "HangWatchdog",
        "LossGuard",
        "PreemptionGuard",
        "TPUCheckpointer",
        "TPUTrainer",
        "TrainingResult",
        "open_data",
    ),
    ".training.export": ("export_run",),
    ".training.trained_model": ("load_trained",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
