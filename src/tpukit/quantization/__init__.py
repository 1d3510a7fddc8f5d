"""Weights and vectors in few bits: codebooks, the vector codec, and their files."""

from ..lazy import lazy_names

HOMES = {
    ".cache_codebooks": ("fit_cache", "load_cache", "save_cache"),
    ".cache_retention": ("CacheReport", "measure_cache"),
    ".codebook": ("Codebook", "FitReport"),
    ".codebook_training": ("train_codebook",),
    ".codec": ("check_weight_metric", "output_error", "quantize_matrix"),
    ".evaluation": ("Evaluation", "Measured"),
    ".files": ("load_arrays", "load_codebook", "save_arrays", "save_codebook"),
    ".formats": ("VQ_FORMATS", "VQFormat", "parse_vq_format"),
    ".integration": ("TPUv6VQIntegration",),
    ".model": ("QuantizedModel",),
    ".model_files": ("SavedModel", "load_quantized", "save_quantized"),
    ".placement": ("array_shardings", "place_array"),
    ".plan": ("QuantPlan",),
    ".published.checkpoint": ("QuantizedCheckpoint", "read_quantized"),
    ".quantizing": ("QuantizationResult", "quantize_model"),
    ".report": ("MatrixRow", "QuantReport"),
    ".tuning": ("TuningReport", "tune_parameters"),
    ".uniform": ("quantize_for_tpu",),
    ".vq_array": ("VQArray",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
