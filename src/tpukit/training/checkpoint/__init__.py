"""Checkpoints: asynchronous, atomic, checksummed, and restored onto any mesh."""

from .checkpointer import TPUCheckpointer as TPUCheckpointer
from .restored import Checkpoint as Checkpoint
from .verification import Verification as Verification

__all__ = ["Checkpoint", "TPUCheckpointer", "Verification"]
