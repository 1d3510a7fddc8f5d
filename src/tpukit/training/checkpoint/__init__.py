"""Checkpoints: asynchronous, atomic, checksummed, and restored onto any mesh."""

from .checkpointer import TPUCheckpointer as TPUCheckpointer
from .result import Checkpoint as Checkpoint
from .result import Verification as Verification

__all__ = ["Checkpoint", "TPUCheckpointer", "Verification"]
