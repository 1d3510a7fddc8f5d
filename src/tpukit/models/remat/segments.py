"""Gradient checkpoints between the layers of any function of parameters.

Frameworks show their layers in different ways, or not at all. A traced program shows them all: a
layer is where its parameters are read. So the function is traced, its equations are cut between
layers, where the least is alive, and every piece is a checkpointed segment.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .layers import Layer, layer_names
from .policy import RematPolicy

_CALLS = ("jit", "pjit")  # what jax.jit leaves in a trace, by versions of jax


def checkpoint_segments(function: Callable[..., Any], remat: RematPolicy) -> Callable[..., Any]:
    """The same `function(params, *others)`, in checkpointed segments of so many layers.

    A layer is what reads the parameters of one sub-tree: that of the first number in a path
    ("layers/3", "Block_3"), or without one the outermost. What is read before and after numbered
    layers is no part of their segments, and of a loop over stacked layers every turn is one.
    Values and gradients stay.
    """
    if not remat.active:
        return function

    @functools.wraps(function)
    def run(params: Any, *others: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((params, others, options))
        places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]
        names = layer_names(params)

        def flat(*arrays: Any) -> Any:
            filled = [*leaves]
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            given, rest, named = jax.tree.unflatten(structure, filled)
            return function(given, *rest, **named)

        arrays = [leaves[place] for place in places]
        owners = [names[place] if place < len(names) else None for place in places]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        program = _Program(_opened(closed, owners, arrays), owners)
        outputs = program.run(arrays, remat)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


@dataclass(frozen=True)
class _Visit:
    """Equations from the first to the last that read one layer's parameters in a row."""

    layer: Layer
    first: int
    last: int


class _Program:
    """A traced function, and whose parameters its inputs are."""

    def __init__(self, closed: Any, owners: Sequence[Layer | None]) -> None:
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.owner: dict[Any, Layer] = {
            variable: owner
            for variable, owner in zip(self.jaxpr.invars, owners, strict=True)
            if owner is not None
        }

    def run(self, arrays: Sequence[Any], remat: RematPolicy) -> list[Any]:
        """Evaluate it piece by piece."""
        jaxpr = self.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.invars, arrays, strict=True))
        values.update(zip(jaxpr.constvars, self.closed.consts, strict=True))
        cuts = [0, *self.cuts(remat.every_n_layers), len(jaxpr.eqns)]
        for start, stop in pairwise(cuts):
            part = self._part(start, stop, remat)
            made = remat.wrap(core.jaxpr_as_fun(core.ClosedJaxpr(part, ())))(
                *(values[variable] for variable in part.invars)
            )
            values.update(zip(part.outvars, made, strict=True))
        return [
            atom.val if isinstance(atom, core.Literal) else values[atom] for atom in jaxpr.outvars
        ]

    def cuts(self, every: int) -> list[int]:
        """Places between equations at which a segment ends, in order."""
        found: list[int] = []
        visits = self._visits()
        alive = self._bytes_alive()
        layers = 1
        for before, after in pairwise(visits):
            changes = before.layer.numbered != after.layer.numbered
            if changes or layers == every:
                between = range(before.last + 1, after.first + 1)
                found.append(min(between, key=lambda place: alive[place]))
                layers = 0
            layers += 1
        return found

    def _visits(self) -> list[_Visit]:
        """Which layer is at work when; what only changes parameters' form is no work."""
        visits: list[_Visit] = []
        for place, equation in enumerate(self.jaxpr.eqns):
            read = _variables(equation.invars)
            owners = [self.owner[one] for one in read if one in self.owner]
            if not owners:
                continue
            if len(owners) == len(read) and len(set(owners)) == 1:
                self.owner.update(dict.fromkeys(equation.outvars, owners[0]))
            elif visits and visits[-1].layer == owners[0]:
                visits[-1] = _Visit(owners[0], visits[-1].first, place)
            else:
                visits.append(_Visit(owners[0], place, place))
        return visits

    def _bytes_alive(self) -> np.ndarray:
        """Bytes of activations that are alive before each equation."""
        equations = self.jaxpr.eqns
        change = np.zeros(len(equations) + 2)
        last = {variable: len(equations) for variable in _variables(self.jaxpr.outvars)}
        for place in reversed(range(len(equations))):
            for variable in _variables(equations[place].invars):
                last.setdefault(variable, place)
        for place, equation in enumerate(equations):
            for variable in equation.outvars:
                if variable in last and variable not in self.owner:
                    change[place + 1] += _size(variable)
                    change[last[variable] + 1] -= _size(variable)
        return np.cumsum(change)

    def _part(self, start: int, stop: int, remat: RematPolicy) -> Any:
        """Some of the equations as a program: reads what came before, gives what is used later."""
        equations = [self._with_turns(one, remat) for one in self.jaxpr.eqns[start:stop]]
        made = {variable for equation in equations for variable in equation.outvars}
        later = [atom for equation in self.jaxpr.eqns[stop:] for atom in equation.invars]
        wanted = set(_variables([*later, *self.jaxpr.outvars]))
        read = dict.fromkeys(
            variable
            for equation in equations
            for variable in _variables(equation.invars)
            if variable not in made
        )
        given = [one for equation in equations for one in equation.outvars if one in wanted]
        return _program_of(self.jaxpr, [*read], given, equations)

    def _with_turns(self, equation: Any, remat: RematPolicy) -> Any:
        """A loop over stacked layers with every turn a segment; any other equation as it is."""
        if equation.primitive.name != "scan":
            return equation
        whole = sum(equation.params.get(name, 0) for name in ("num_consts", "num_carry"))
        if not any(one in self.owner for one in _variables(equation.invars[whole:])):
            return equation
        body = equation.params["jaxpr"]
        turn = remat.wrap(core.jaxpr_as_fun(body), in_loop=True)
        shapes = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=getattr(one, "weak_type", False))
            for one in body.in_avals
        ]
        made = jax.make_jaxpr(turn)(*shapes)
        return equation.replace(params={**equation.params, "jaxpr": made})


def _opened(closed: Any, owners: Sequence[Layer | None], arrays: Sequence[Any]) -> Any:
    """The trace without calls in it that hide several layers, such as a model under jax.jit."""
    given = dict(zip(closed.jaxpr.invars, owners, strict=True))
    if not any(_hides_layers(equation, given) for equation in closed.jaxpr.eqns):
        return closed

    def evaluate(closed: Any, owners: Sequence[Layer | None], values: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        owner = dict(zip(jaxpr.invars, owners, strict=True))
        held = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        held.update(zip(jaxpr.invars, values, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else held[atom]

        for equation in jaxpr.eqns:
            if _hides_layers(equation, owner):
                inner = equation.params["jaxpr"]
                whose = [_owner_of(atom, owner) for atom in equation.invars]
                made = evaluate(inner, whose, [*map(value, equation.invars)])
            else:
                read = [*dict.fromkeys(_variables(equation.invars))]
                alone = _program_of(jaxpr, read, equation.outvars, [equation])
                made = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*map(value, read))
            held.update(zip(equation.outvars, made, strict=True))
        return [*map(value, jaxpr.outvars)]

    return jax.make_jaxpr(lambda *values: evaluate(closed, owners, values))(*arrays)


def _owner_of(atom: Any, owner: dict[Any, Layer | None]) -> Layer | None:
    return None if isinstance(atom, core.Literal) else owner.get(atom)


def _program_of(jaxpr: Any, read: list[Any], given: list[Any], equations: list[Any]) -> Any:
    effects = frozenset[Any]().union(*(equation.effects for equation in equations))
    return jaxpr.replace(constvars=[], invars=read, outvars=given, eqns=equations, effects=effects)


def _hides_layers(equation: Any, owner: dict[Any, Layer | None]) -> bool:
    """Whether it is a call that reads the parameters of several layers."""
    if equation.primitive.name not in _CALLS:
        return False
    found = {owner.get(one) for one in _variables(equation.invars)} - {None}
    return len(found) > 1


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _size(variable: Any) -> float:
    shape = getattr(variable.aval, "shape", ())
    itemsize = getattr(getattr(variable.aval, "dtype", None), "itemsize", 0)
    return float(np.prod(shape, dtype=float) * itemsize)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)
