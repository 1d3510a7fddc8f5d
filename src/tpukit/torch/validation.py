"""Checks and warnings before a module becomes a program."""

import logging
from typing import Any

from ..errors import TPUValidationError
from ..models.adapters.torch_module.state import ModuleState

logger = logging.getLogger(__name__)


def check_is_module(model: Any, *, what: str) -> None:
    """Refuse anything but an instance of `nn.Module`.

    Raises:
        TPUValidationError: It is a class, or not a module.
    """
    import torch

    if isinstance(model, torch.nn.Module):
        return
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise TPUValidationError(f"{what} got the class {model.__name__}; pass an instance of it.")
    raise TPUValidationError(
        f"{what} expects an nn.Module, got {type(model).__name__}; pass a module."
    )


def notes_on(module: Any) -> list[str]:
    """Return the differences from plain torch, each as a sentence."""
    import torch

    nn = torch.nn
    state = ModuleState.of(module)
    notes: list[str] = []
    narrowed = state.narrowed()
    if narrowed:
        notes.append(
            f"{_some(narrowed)}: float64 becomes float32, the widest format of the device; call "
            "model.float() to avoid this warning."
        )
    if not state.has_values:
        notes.append(
            "the module is on torch's meta device and has no values, so it can be checked but not "
            "run."
        )
    for name, inner in module.named_modules():
        own = name or type(module).__name__
        if isinstance(inner, nn.Embedding) and inner.sparse:
            notes.append(f"{own}: sparse gradients become dense ones.")
        if isinstance(inner, nn.Embedding) and inner.max_norm is not None:
            notes.append(
                f"{own}: max_norm changes the table in the forward, so it runs in plain torch."
            )
        if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
            notes.append(
                f"{own}: {type(inner).__name__} distributes the work itself; pass the module "
                "inside "
                "it, and a mesh to distribute it."
            )
    return notes


def report(notes: list[str], *, strict: bool) -> None:
    """Log notes as warnings, or raise them under strict validation.

    Raises:
        TPUValidationError: There are notes, and validation is strict.
    """
    if notes and strict:
        raise TPUValidationError(
            " ".join(notes) + " Strict validation refuses this; change it, or set "
            "enable_strict_validation = False."
        )
    for note in notes:
        logger.warning("%s", note)


def _some(paths: list[str]) -> str:
    names = [path.replace("/", ".") for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
