"""Adapters: models of any framework behind one protocol, and the registry of model kinds."""

from .protocol import Applied as Applied
from .protocol import ModelAdapter as ModelAdapter
from .protocol import ModelInputs as ModelInputs
from .protocol import Variables as Variables
from .protocol import head_counts_of as head_counts_of
from .registry import adapt as adapt
from .registry import register_adapter as register_adapter
from .registry import unregister_adapter as unregister_adapter
from .transformer import TransformerAdapter as TransformerAdapter

__all__ = [
    "Applied",
    "ModelAdapter",
    "ModelInputs",
    "TransformerAdapter",
    "Variables",
    "adapt",
    "head_counts_of",
    "register_adapter",
    "unregister_adapter",
]
