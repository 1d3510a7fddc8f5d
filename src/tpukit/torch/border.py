"""Where torch and jax meet: one call of a module as one program, with a gradient torch knows.

Tensors stay torch's own on the outside, so an ordinary loop needs nothing else: autograd calls the
program's own backward, any torch optimizer moves the parameters, and the next call sees them.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from ..models.adapters.protocol import Variables
from ..models.adapters.torch_module.adapter import TorchModel, run_module
from ..models.adapters.torch_module.arrays import to_array, to_tensor
from ..models.adapters.torch_module.nesting import take_apart
from ..models.adapters.torch_module.refusals import explained
from ..models.adapters.torch_module.state import ModuleState
from ..models.remat.policy import RematPolicy


@dataclass(frozen=True)
class Arrays:
    """The arguments of a program.

    Attributes:
        params: What is trained, by path.
        carried: What else the module reads, by path.
        moving: Inputs whose gradient is asked for.
        fixed: All other inputs.
        key: For its random numbers.
    """

    params: dict[str, jax.Array]
    carried: dict[str, jax.Array]
    moving: list[jax.Array]
    fixed: list[jax.Array]
    key: jax.Array

    def as_tuple(self) -> tuple[Any, ...]:
        """Return them in the order in which programs take them."""
        return self.params, self.carried, self.moving, self.fixed, self.key


class ArgumentPlacement(Protocol):
    """Where a program's arguments lie; without one, all is on one device."""

    def rules(self) -> AbstractContextManager[Any]:
        """Return what is open while the program is traced."""
        ...

    def arguments(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return a program's arguments, in its order, on their shards."""
        ...

    def by_batch(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return arrays split by their first dimension."""
        ...


class ModuleProgram:
    """A module's forward and backward for arguments of one shape, each traced once.

    Args:
        module: An `nn.Module`.
        state: Its tensors by path.
        rebuild: Makes the arguments of the call from its tensors.
        asked: For each of those tensors, whether its gradient is asked for.
        remat: What the backward pass computes again.
        placement: On a mesh, where everything lies.
        donate: Whether a call without gradients may reuse the memory of its inputs.
    """

    def __init__(
        self,
        module: Any,
        state: ModuleState,
        rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        asked: tuple[bool, ...],
        remat: RematPolicy,
        *,
        placement: ArgumentPlacement | None = None,
        donate: bool = False,
    ) -> None:
        self.module, self._state, self._rebuild = module, state, rebuild
        self._asked, self._remat, self._placement = asked, remat, placement
        self._restore: Callable[[list[Any], list[Any]], Any] | None = None
        self._forward = jax.jit(self._run, donate_argnums=3 if donate else ())
        self._forward_with_gradient = jax.jit(self._run_with_gradient)
        self._backward: Any = jax.jit(lambda pull_back, cotangents: pull_back(cotangents))
        self._reached: dict[tuple[bool, ...], list[bool]] = {}

    def forward(self, arrays: Arrays) -> Any:
        """Run; floats, and a pair of other results and the state that is carried on."""
        with warnings.catch_warnings():
            # An input whose shape no result has cannot be reused, and that is all it says.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self._placed(self._forward, arrays)

    def forward_with_gradient(self, arrays: Arrays) -> Any:
        """Run, and return the backward pass too, as a tree of what it needs."""
        return self._placed(self._forward_with_gradient, arrays)

    def backward(self, pull_back: Any, cotangents: list[jax.Array]) -> Any:
        """Return gradients of the parameters and of the moving inputs."""
        return self._backward(pull_back, self._split(cotangents))

    def _placed(self, run: Callable[..., Any], arrays: Arrays) -> Any:
        if self._placement is None:
            return run(*arrays.as_tuple())
        with self._placement.rules():
            return run(*self._placement.arguments(arrays))

    def _split(self, arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays if self._placement is None else self._placement.by_batch(arrays)

    def reached(
        self, pull_back: Any, cotangents: list[jax.Array], given: tuple[bool, ...]
    ) -> list[bool]:
        """Return for each parameter and moving input whether its gradient depends on a given one.

        Of all others torch has none rather than zeros, and an optimizer leaves them alone.
        """
        if given not in self._reached:
            jaxpr = self._backward.trace(pull_back, self._split(cotangents)).jaxpr.jaxpr
            starts = jaxpr.invars[len(jaxpr.invars) - len(given) :]
            known = {one for one, yes in zip(starts, given, strict=True) if yes}
            for equation in jaxpr.eqns:
                if any(isinstance(one, Var) and one in known for one in equation.invars):
                    known.update(equation.outvars)
            self._reached[given] = [isinstance(one, Var) and one in known for one in jaxpr.outvars]
        return self._reached[given]

    def outputs(self, floats: list[Any], others: list[Any]) -> Any:
        """Return results in the structure that the module gave them."""
        assert self._restore is not None, "a program that has run knows its outputs"
        return self._restore(floats, others)

    def _run(
        self, params: Any, carried: Any, moving: list[Any], fixed: list[Any], key: jax.Array
    ) -> tuple[list[jax.Array], tuple[list[jax.Array], Any]]:
        inputs = iter(moving), iter(fixed)
        tensors = [next(inputs[0] if asked else inputs[1]) for asked in self._asked]
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
        self, params: Any, carried: Any, moving: list[Any], fixed: list[Any], key: jax.Array
    ) -> Any:
        def differentiated(params: Any, moving: list[Any]) -> Any:
            return self._run(params, carried, moving, fixed, key)

        return jax.vjp(differentiated, params, moving, has_aux=True)

    def _call(self, module: Any, batch: Any) -> Any:
        arguments, options = self._rebuild(batch["tensors"])
        return module(*arguments, **options)


def call_with_gradient(program: ModuleProgram, arrays: Arrays, tensors: list[Any]) -> Any:
    """Run a program so that torch's autograd can go back through it.

    Args:
        program: What to run.
        arrays: Its arguments.
        tensors: The torch tensors behind its parameters and moving inputs, in their order.

    Returns:
        Outputs of floating point, the others, and the state that the module carries on.
    """
    rest: list[Any] = []
    floats = _border().apply(program, arrays, rest, *tensors)
    others, changed = rest
    return list(floats), others, changed


@cache
def _border() -> Any:
    """Return the `torch.autograd.Function` of all programs, made when torch is first needed."""
    import torch

    class Border(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, program: ModuleProgram, arrays: Arrays, rest: list[Any], *_: Any
        ) -> Any:
            ctx.set_materialize_grads(False)
            floats, ctx.pull_back, found = program.forward_with_gradient(arrays)
            ctx.program, ctx.formats = program, [(one.shape, one.dtype) for one in floats]
            ctx.paths = [*arrays.params]  # jax gives a dict's entries back in another order
            rest[:] = found
            return tuple(map(to_tensor, floats))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            cotangents = [
                jnp.zeros(shape, dtype) if one is None else to_array(one, copy=False).astype(dtype)
                for one, (shape, dtype) in zip(gradients, ctx.formats, strict=True)
            ]
            given = tuple(one is not None for one in gradients)
            with explained(ctx.program.module):
                found = ctx.program.backward(ctx.pull_back, cotangents)
                reached = ctx.program.reached(ctx.pull_back, cotangents, given)
            leaves, tree = jax.tree.flatten(jax.block_until_ready(found))
            tensors = [
                to_tensor(one) if yes else None for one, yes in zip(leaves, reached, strict=True)
            ]
            params, moving = jax.tree.unflatten(tree, tensors)
            return (None, None, None, *(params[path] for path in ctx.paths), *moving)

    return Border


def _taken_apart(outputs: Any) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Return the arrays of floating point of a result, its other arrays, and the way back."""
    arrays, nesting = take_apart(outputs, jax.Array, only_plain=True)
    is_float = [jnp.issubdtype(one.dtype, jnp.inexact) for one in arrays]

    def restore(floats: list[Any], others: list[Any]) -> Any:
        moving, fixed = iter(floats), iter(others)
        return nesting.rebuild([next(moving if floating else fixed) for floating in is_float])

    floats = [one for one, floating in zip(arrays, is_float, strict=True) if floating]
    others = [one for one, floating in zip(arrays, is_float, strict=True) if not floating]
    return floats, others, restore
