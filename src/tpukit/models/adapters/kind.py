"""One kind of model: how it is recognised, adapted and checkpointed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..remat.policy import RematPolicy
from .own_files import Describe, WriteFiles, write_arrays
from .protocol import ModelAdapter, ModelInputs

Recognises = Callable[[object], bool]
Build = Callable[[Any, ModelInputs], ModelAdapter]
Checkpoint = Callable[[Any, RematPolicy], Any]


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One entry of the registry.

    Attributes:
        name: The framework, e.g. "flax linen".
        accepts: What a user passes, e.g. "a flax linen module"; error messages list it.
        recognises: Whether an object is a model of this kind. It must not import the framework.
        build: Makes the adapter from such a model and what it is called with.
        checkpoint: Makes the same model with gradient checkpoints in it; None where the
            framework has no such thing.
        describe: Records what `write` needs beside the model's arrays.
        write: Writes a trained model in the framework's own files.
    """

    name: str
    accepts: str
    recognises: Recognises
    build: Build
    checkpoint: Checkpoint | None = None
    describe: Describe | None = None
    write: WriteFiles = write_arrays
