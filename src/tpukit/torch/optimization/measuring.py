"""What an optimisation changed, in figures that say where they come from."""

import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp

from ...checker.check import check_request
from ...compiler.program.request import make_request
from ...hardware import Slice
from ...hardware.figure import Figure
from ...models.adapters.protocol import Variables
from ...models.adapters.torch_module.adapter import TorchModel, run_module
from ...models.adapters.torch_module.arrays import shape_of
from ...models.adapters.torch_module.environment import torch_trees
from ...models.adapters.torch_module.state import ModuleState
from ...models.remat.policy import RematPolicy

_CALLS = 5


def largest_difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two results, relative to the largest number of a tensor."""
    import torch

    trees = torch_trees()
    pairs = zip(trees.tree_leaves(found), trees.tree_leaves(expected), strict=True)
    worst = 0.0
    for one, other in pairs:
        if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
            continue
        if one.shape != other.shape:
            return float("inf")
        if other.numel() and other.is_floating_point():
            scale = max(other.abs().max().item(), 1e-6)
            difference = (one.double() - other.double()).abs().max().item() / scale
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def forward_time(run: Callable[[], Any], *, of: str) -> Figure:
    """Time calls that were made once before, without gradients: the median."""
    run()
    taken: list[float] = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    source = f"{of}, median of {_CALLS} calls on {jax.default_backend()}"
    return Figure(statistics.median(taken), "s", "measured", source, date.today().isoformat())


def parameter_bytes(module: Any) -> Figure:
    """Return what a module's parameters take."""
    taken = sum(one.numel() * one.element_size() for one in module.parameters())
    return Figure(taken, "B", "measured", "the module's own tensors", date.today().isoformat())


def gradient_program(
    module: Any, call: Callable[[Any, list[Any]], Any], tensors: list[Any], remat: RematPolicy
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return forward and backward of a module as one function, and the shapes it takes.

    Args:
        module: An `nn.Module`.
        call: (module, tensors of the sample) -> outputs.
        tensors: Those of the sample.
        remat: What the backward pass computes again.
    """
    state = ModuleState.of(module)
    trained, carried = state.shapes()

    def program(params: Any, rest: Any, inputs: list[Any]) -> Any:
        def loss(params: Any) -> Any:
            outputs, changed = run_module(
                TorchModel(module, lambda one, batch: call(one, batch["tensors"])),
                state,
                Variables(params, rest),
                {"tensors": inputs},
                rng=jax.random.key(0),
                remat=remat,
            )
            leaves = torch_trees().tree_leaves(outputs)
            floats = [
                one
                for one in leaves
                if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jnp.floating)
            ]
            return sum(jnp.mean(one.astype(jnp.float32) ** 2) for one in floats), changed

        return jax.grad(loss, has_aux=True)(params)

    return program, (trained, carried, [shape_of(one) for one in tensors])


def ask_compiler(
    on: Slice, program: Callable[..., Any], shapes: tuple[Any, ...]
) -> dict[str, Figure]:
    """Return memory and predicted time of a program on one chip of a slice."""
    result = check_request(make_request(program, on, *shapes))
    today, source = date.today().isoformat(), f"forward and backward on one chip of {on}"
    memory = Figure(result.memory.total_bytes, "B", "compiler", source, today)
    if result.prediction is None:
        return {"memory": memory, "step_time": Figure.missing("s", result.no_prediction or "none")}
    seconds = Figure(result.prediction.step_time_s, "s", "model", source, today)
    return {"memory": memory, "step_time": seconds}
