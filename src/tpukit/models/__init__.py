"""Models: reference transformers, presets, remat, and adapters for user models.

Names load on first use, because a planner that only reads configurations needs no jax or flax.
"""

from ..lazy import lazy_names

HOMES = {
    ".adapters.protocol": (
        "Applied",
        "ModelAdapter",
        "ModelInputs",
        "Variables",
    ),
    ".adapters.registry": (
        "register_adapter",
        "unregister_adapter",
    ),
    ".execution": ("Execution",),
    ".huggingface.weights": (
        "ImportedModel",
        "export_huggingface",
        "import_huggingface",
    ),
    ".loss": (
        "WeightedLoss",
        "chunked_next_token_loss",
        "next_token_loss",
    ),
    ".presets": (
        "Preset",
        "get_preset",
        "list_presets",
    ),
    ".remat.gradient_checkpointing": ("enable_gradient_checkpointing",),
    ".remat.policy": ("RematPolicy",),
    ".transformer.accounting": (
        "FlopsPerToken",
        "ParameterCount",
    ),
    ".transformer.config": (
        "RopeScaling",
        "TransformerConfig",
    ),
    ".transformer.model": ("Transformer",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
