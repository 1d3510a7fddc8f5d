"""The border of torch and jax: one call of a module as one program, with a torch gradient.

Inputs, outputs and parameters are torch tensors, so an ordinary training loop works. Autograd calls
the program's backward pass, any torch optimizer updates the parameters, and the next call sees it.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from ..annotations import PyTree
from ..models.adapters.protocol import Variables
from ..models.adapters.torch_module.adapter import TorchModel, explained, run_module
from ..models.adapters.torch_module.arrays import to_array, to_tensor
from ..models.adapters.torch_module.environment import take_apart
from ..models.adapters.torch_module.state import ModuleState
from ..models.remat.policy import RematPolicy

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arrays:
    """The arguments of a program.

    Attributes:
        params: Trained parameters by path.
        carried: All other state of the module by path.
        moving: Inputs that need a gradient.
        fixed: All other inputs.
        key: Random key.
    """

    params: dict[str, jax.Array]
    carried: dict[str, jax.Array]
    moving: list[jax.Array]
    fixed: list[jax.Array]
    key: jax.Array

    def as_tuple(self) -> tuple[Any, ...]:
        """Return them in the order of a program's arguments."""
        return self.params, self.carried, self.moving, self.fixed, self.key


class ArgumentPlacement(Protocol):
    """The placement of a program's arguments on a mesh."""

    def rules(self) -> AbstractContextManager[Any]:
        """Return the context in which the program is traced."""
        ...

    def arguments(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return a program's arguments, in order, on their shards."""
        ...

    def by_batch(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return arrays sharded by their first dimension."""
        ...


class ModuleProgram:
    """A module's forward and backward for arguments of one shape, each traced once.

    Args:
        module: An `nn.Module`.
        state: Its tensors by path.
        rebuild: Builds the arguments of the call from its tensors.
        needs_gradient: For each of those tensors, whether its gradient is needed.
        remat: Rematerialization policy.
        placement: Placement on a mesh; None for one device.
        donate: Whether a call without gradients may reuse the memory of its inputs.
    """

    def __init__(
        self,
        module: "torch.nn.Module",
        state: ModuleState,
        rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        needs_gradient: tuple[bool, ...],
        remat: RematPolicy,
        *,
        placement: ArgumentPlacement | None = None,
        donate: bool = False,
    ) -> None:
        self.module, self._state, self._rebuild = module, state, rebuild
        self._needs_gradient, self._remat, self._placement = needs_gradient, remat, placement
        self._restore: Callable[[list[Any], list[Any]], Any] | None = None
        self._forward = jax.jit(self._run, donate_argnums=3 if donate else ())
        self._forward_with_gradient = jax.jit(self._run_with_gradient)
        self._backward: Any = jax.jit(lambda pull_back, cotangents: pull_back(cotangents))
        self._reached: dict[tuple[bool, ...], list[bool]] = {}

    def forward(self, arrays: Arrays) -> PyTree:
        """Run; return floats, and a pair of other results and the changed state."""
        with warnings.catch_warnings():
            # It only means that no result has the shape of the input.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self._placed(self._forward, arrays)

    def forward_with_gradient(self, arrays: Arrays) -> PyTree:
        """Run, and return the backward pass too, as a tree of its residuals."""
        return self._placed(self._forward_with_gradient, arrays)

    def backward(self, pull_back: PyTree, cotangents: list[jax.Array]) -> PyTree:
        """Return gradients of the parameters and the moving inputs."""
        return self._backward(pull_back, self._split(cotangents))

    def _placed(self, run: Callable[..., Any], arrays: Arrays) -> PyTree:
        if self._placement is None:
            return run(*arrays.as_tuple())
        with self._placement.rules():
            return run(*self._placement.arguments(arrays))

    def _split(self, arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays if self._placement is None else self._placement.by_batch(arrays)

    def reached(
        self, pull_back: PyTree, cotangents: list[jax.Array], given: tuple[bool, ...]
    ) -> list[bool]:
        """Return whether a given cotangent reaches the gradient of each parameter and input.

        torch has no gradient, rather than zeros, for the others, so an optimizer skips them.
        """
        if given not in self._reached:
            jaxpr = self._backward.trace(pull_back, self._split(cotangents)).jaxpr.jaxpr
            starts = jaxpr.invars[len(jaxpr.invars) - len(given) :]
            known = {start for start, is_given in zip(starts, given, strict=True) if is_given}
            for equation in jaxpr.eqns:
                if any(isinstance(var, Var) and var in known for var in equation.invars):
                    known.update(equation.outvars)
            self._reached[given] = [isinstance(var, Var) and var in known for var in jaxpr.outvars]
        return self._reached[given]

    def outputs(self, floats: list[PyTree], others: list[PyTree]) -> PyTree:
        """Return results in the structure of the module's output."""
        assert self._restore is not None, "the program has run, so its output structure is known"
        return self._restore(floats, others)

    def _run(
        self, params: PyTree, carried: PyTree, moving: list[Any], fixed: list[Any], key: jax.Array
    ) -> tuple[list[jax.Array], tuple[list[jax.Array], Any]]:
        inputs = iter(moving), iter(fixed)
        tensors = [next(inputs[0] if moves else inputs[1]) for moves in self._needs_gradient]
        outputs, changed = run_module(
            TorchModel(self.module, self._call),
            self._state,
            Variables(params, carried),
            {"tensors": tensors},
            rng=key,
            remat=self._remat,
        )
        floats, others, self._restore = _taken_apart(outputs)
        return floats, (others, changed)

    def _run_with_gradient(
        self, params: PyTree, carried: PyTree, moving: list[Any], fixed: list[Any], key: jax.Array
    ) -> Any:
        def differentiated(params: PyTree, moving: list[PyTree]) -> PyTree:
            return self._run(params, carried, moving, fixed, key)

        return jax.vjp(differentiated, params, moving, has_aux=True)

    def _call(self, module: "torch.nn.Module", batch: PyTree) -> PyTree:
        arguments, options = self._rebuild(batch["tensors"])
        return module(*arguments, **options)


def call_with_gradient(program: ModuleProgram, arrays: Arrays, tensors: list[Any]) -> Any:
    """Run a program so that torch's autograd can differentiate it.

    Args:
        program: The program.
        arrays: Its arguments.
        tensors: The torch tensors of its parameters and moving inputs, in their order.

    Returns:
        Floating-point outputs, the other outputs, and the module's changed state.
    """
    rest: list[PyTree] = []
    floats = _border().apply(program, arrays, rest, *tensors)
    others, changed = rest
    return list(floats), others, changed


@cache
def _border() -> Any:
    """Return the `torch.autograd.Function` of all programs; torch is imported here."""
    import torch

    class Border(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, program: ModuleProgram, arrays: Arrays, rest: list[PyTree], *_: Any
        ) -> PyTree:
            ctx.set_materialize_grads(False)
            floats, ctx.pull_back, others = program.forward_with_gradient(arrays)
            ctx.program, ctx.formats = program, [(array.shape, array.dtype) for array in floats]
            ctx.paths = [*arrays.params]  # jax reorders the entries of a dict
            rest[:] = others
            return tuple(map(to_tensor, floats))

        @staticmethod
        def backward(ctx: Any, *gradients: PyTree) -> PyTree:
            cotangents = [
                jnp.zeros(shape, dtype)
                if gradient is None
                else to_array(gradient, copy=False).astype(dtype)
                for gradient, (shape, dtype) in zip(gradients, ctx.formats, strict=True)
            ]
            given = tuple(gradient is not None for gradient in gradients)
            with explained(ctx.program.module):
                results = ctx.program.backward(ctx.pull_back, cotangents)
                reached = ctx.program.reached(ctx.pull_back, cotangents, given)
            leaves, tree = jax.tree.flatten(jax.block_until_ready(results))
            tensors = [
                to_tensor(leaf) if is_reached else None
                for leaf, is_reached in zip(leaves, reached, strict=True)
            ]
            params, moving = jax.tree.unflatten(tree, tensors)
            return (None, None, None, *(params[path] for path in ctx.paths), *moving)

    return Border


def tensor_of(array: jax.Array) -> "torch.Tensor":
    """Convert an array to a tensor; torch's integers have 64 bits where jax's have 32."""
    import torch

    tensor = to_tensor(array)
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def _taken_apart(outputs: PyTree) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Return a result's float arrays, its other arrays, and a function that rebuilds it."""
    arrays, nesting = take_apart(outputs, jax.Array, only_plain=True)
    is_float = [jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays]

    def restore(floats: list[PyTree], others: list[PyTree]) -> PyTree:
        moving, fixed = iter(floats), iter(others)
        return nesting.rebuild([next(moving if floating else fixed) for floating in is_float])

    floats = [array for array, floating in zip(arrays, is_float, strict=True) if floating]
    others = [array for array, floating in zip(arrays, is_float, strict=True) if not floating]
    return floats, others, restore
