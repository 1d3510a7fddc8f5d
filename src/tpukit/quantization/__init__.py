"""Quantized weights, vectors and KV caches: formats, codecs, searches, measures and files."""

from ..lazy import lazy_names

HOMES = {
    ".cache.codebooks": ("fit_cache", "load_cache", "save_cache"),
    ".cache.retention": ("CacheReport", "measure_cache"),
    ".codebooks.codebook": ("Codebook", "FitReport"),
    ".codebooks.codebook_training": ("train_codebook",),
    ".files.array_files": ("load_arrays", "load_codebook", "save_arrays", "save_codebook"),
    ".files.model_files": ("SavedModel", "load_quantized", "save_quantized"),
    ".formats": ("VQ_FORMATS", "VQFormat", "parse_vq_format"),
    ".integration": ("TPUv6VQIntegration",),
    ".measures.evaluation": ("QuantizationEvaluation", "Measured"),
    ".model": ("QuantizedModel",),
    ".plan": ("QuantPlan",),
    ".published": ("QuantizedCheckpoint", "read_quantized"),
    ".quantizing": ("QuantizationResult", "quantize_model"),
    ".report": ("MatrixRow", "QuantReport"),
    ".search.tuning": ("TuningReport", "tune_parameters"),
    ".uniform": ("quantize_for_tpu",),
    ".vector_codes.codec": ("check_weight_metric", "output_error", "quantize_matrix"),
    ".vector_codes.vq_array": ("VQArray", "array_shardings", "place_array"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
