# Written by `make format` from the list in __init__.py.

from .adapters.protocol import Applied as Applied
from .adapters.protocol import ModelAdapter as ModelAdapter
from .adapters.protocol import ModelInputs as ModelInputs
from .adapters.protocol import Variables as Variables
from .adapters.registry import register_adapter as register_adapter
from .adapters.registry import unregister_adapter as unregister_adapter
from .execution import Execution as Execution
from .huggingface.weights import ImportedModel as ImportedModel
from .huggingface.weights import export_huggingface as export_huggingface
from .huggingface.weights import import_huggingface as import_huggingface
from .loss import WeightedLoss as WeightedLoss
from .loss import chunked_next_token_loss as chunked_next_token_loss
from .loss import next_token_loss as next_token_loss
from .presets import Preset as Preset
from .presets import get_preset as get_preset
from .presets import list_presets as list_presets
from .remat.gradient_checkpointing import (
    enable_gradient_checkpointing as enable_gradient_checkpointing,
)
from .remat.policy import RematPolicy as RematPolicy
from .transformer.accounting import FlopsPerToken as FlopsPerToken
from .transformer.accounting import ParameterCount as ParameterCount
from .transformer.config import RopeScaling as RopeScaling
from .transformer.config import TransformerConfig as TransformerConfig
from .transformer.model import Transformer as Transformer

__all__ = [
    "Applied",
    "Execution",
    "FlopsPerToken",
    "ImportedModel",
    "ModelAdapter",
    "ModelInputs",
    "ParameterCount",
    "Preset",
    "RematPolicy",
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "Variables",
    "WeightedLoss",
    "chunked_next_token_loss",
    "enable_gradient_checkpointing",
    "export_huggingface",
    "get_preset",
    "import_huggingface",
    "list_presets",
    "next_token_loss",
    "register_adapter",
    "unregister_adapter",
]
