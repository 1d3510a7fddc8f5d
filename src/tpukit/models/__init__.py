"""Workloads: reference transformers, presets, remat, and adapters for anyone's model.

Names load on first use: a planner that only reads configurations needs neither jax nor flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accounting import FlopsPerToken as FlopsPerToken
    from .accounting import ParameterCount as ParameterCount
    from .chunked_loss import chunked_next_token_loss as chunked_next_token_loss
    from .execution import Execution as Execution
    from .gradient_checkpointing import (
        enable_gradient_checkpointing as enable_gradient_checkpointing,
    )
    from .huggingface import ImportedModel as ImportedModel
    from .huggingface import export_huggingface as export_huggingface
    from .huggingface import import_huggingface as import_huggingface
    from .loss import WeightedLoss as WeightedLoss
    from .loss import next_token_loss as next_token_loss
    from .presets import Preset as Preset
    from .presets import get_preset as get_preset
    from .presets import list_presets as list_presets
    from .remat import RematPolicy as RematPolicy
    from .train_state import TrainState as TrainState
    from .transformer import Transformer as Transformer
    from .transformer_config import RopeScaling as RopeScaling
    from .transformer_config import TransformerConfig as TransformerConfig
    from .workload import StepShardings as StepShardings
    from .workload import Workload as Workload

# Which module each name lives in; the block above says the same to type checkers.
_HOMES = {
    "Execution": "execution",
    "FlopsPerToken": "accounting",
    "ImportedModel": "huggingface",
    "ParameterCount": "accounting",
    "Preset": "presets",
    "RematPolicy": "remat",
    "RopeScaling": "transformer_config",
    "StepShardings": "workload",
    "TrainState": "train_state",
    "Transformer": "transformer",
    "TransformerConfig": "transformer_config",
    "WeightedLoss": "loss",
    "Workload": "workload",
    "chunked_next_token_loss": "chunked_loss",
    "enable_gradient_checkpointing": "gradient_checkpointing",
    "export_huggingface": "huggingface",
    "get_preset": "presets",
    "import_huggingface": "huggingface",
    "list_presets": "presets",
    "next_token_loss": "loss",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  names of the block above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpukit.models' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
