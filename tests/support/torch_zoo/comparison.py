"""A module of the zoo against eager torch: outputs, gradients and buffers."""

import copy
import logging
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tpukit.errors import TPUError
from tpukit.models.adapters.torch_module.environment import torch_trees
from tpukit.torch.prepared import link_of, prepare

from .entry import Entry

Verdict = Literal["equal", "not compiled", "refused", "WRONG"]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """How a module fared.

    Attributes:
        entry: The module.
        verdict: "equal"; "not compiled": it ran as plain torch with a warning; "refused": an error
            of tpukit; "WRONG": numbers that differ, or an error that nobody gave a name.
        error: The largest difference, relative to the largest number of its tensor.
        note: What was said, or where the largest difference is.
    """

    entry: Entry
    verdict: Verdict
    error: float = 0.0
    note: str = ""


def compare(entry: Entry, *, tolerance: float = TOLERANCE, dtype: Any = torch.float32) -> Outcome:
    """Run a module through tpukit and in eager torch, forward and backward."""
    logging.getLogger("tpukit.torch.prepared").disabled = True
    eager = entry.module().to(dtype)
    module = prepare(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _measured(eager, entry, dtype)
        try:
            found = _measured(module, entry, dtype)
        except TPUError as error:
            return Outcome(entry, "refused", note=f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  anything else is what this table looks for
            return Outcome(entry, "WRONG", note=f"{type(error).__name__}: {error}"[:300])
    link = link_of(module)
    if link is not None and link.stays_eager:
        return Outcome(entry, "not compiled", note=link.stays_eager)
    for name, one in expected.items():
        # torch has zeros where an operation knows a gradient by a formula that is always zero.
        if name.startswith("gradient") and not one.any():
            found.setdefault(name, one)
    if found.keys() != expected.keys():
        missing = sorted(found.keys() ^ expected.keys())
        return Outcome(entry, "WRONG", note=f"on one side only: {', '.join(missing)}")
    errors = {name: _difference(found[name], one) for name, one in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    verdict = "equal" if errors[worst] <= tolerance else "WRONG"
    return Outcome(entry, verdict, errors[worst], worst)


def _measured(module: Any, entry: Entry, dtype: Any) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and buffers after one call, by name."""
    inputs = [
        one.detach()
        .to(dtype if one.is_floating_point() else None)
        .requires_grad_(one.requires_grad)
        for one in entry.inputs()
    ]
    leaves = [
        one for one in torch_trees().tree_leaves(module(*inputs)) if isinstance(one, torch.Tensor)
    ]
    moving = [one for one in leaves if one.requires_grad]
    found = {f"output {index}": one.detach() for index, one in enumerate(leaves)}
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in moving]
    if moving:
        torch.autograd.backward(moving, weights)
    for name, one in [
        *module.named_parameters(),
        *((f"input {i}", x) for i, x in enumerate(inputs)),
    ]:
        if one.grad is not None:
            found[f"gradient of {name}"] = one.grad
    return found | {f"buffer {name}": one.detach() for name, one in module.named_buffers()}


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    one, other = (tensor.detach().double() for tensor in (found, expected))
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = (torch.nan_to_num(tensor, posinf=1e30, neginf=-1e30) for tensor in (one, other))
    scale = max(other.abs().max().item(), 1e-6)
    return (one - other).abs().max().item() / scale
