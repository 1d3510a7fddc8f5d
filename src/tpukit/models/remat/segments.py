"""Gradient checkpoints between the layers of any function of parameters.

Frameworks expose their layers in different ways or not at all, but a traced program shows where the
parameters of each layer are read. So the function is traced and its equations are split between
layers, where the fewest bytes are alive. Every part is a checkpointed segment.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from .policy import RematPolicy

_CALLS = ("jit", "pjit")  # what jax.jit leaves in a trace, by versions of jax


def checkpoint_segments(function: Callable[..., Any], remat: RematPolicy) -> Callable[..., Any]:
    """Return the same `function(params, *others)` in checkpointed segments.

    A layer is the code that reads the parameters of one subtree: up to the first number in a path
    ("layers/3", "Block_3"), or the outermost subtree. Code before and after numbered layers is not
    part of their segments. In a scan over stacked layers every iteration is a segment. Values and
    gradients do not change.
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


class Layer(NamedTuple):
    """One layer of a model.

    Attributes:
        path: The path of its parameters in the tree.
        numbered: Whether the path ends in a number, as in a list of equal layers.
    """

    path: tuple[str, ...]
    numbered: bool


def layer_names(params: Any) -> list[Layer]:
    """Return the layer of every leaf of `params`, in the order of the leaves."""
    paths = [
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    # A common prefix ("params") does not distinguish layers.
    shared = next(
        (place for place, names in enumerate(zip(*paths, strict=False)) if len({*names}) > 1), 0
    )
    return [_layer(path[shared:]) for path in paths]


def _layer(names: tuple[str, ...]) -> Layer:
    """Return the path up to its first number, or its first part.

    Example:
        ("layers", "3", "up", "kernel") -> ("layers", "3"); ("head", "kernel") -> ("head",)
    """
    for place, name in enumerate(names):
        if name[-1:].isdigit():
            return Layer(names[: place + 1], True)
    return Layer(names[:1], False)


@dataclass(frozen=True)
class _Visit:
    """Consecutive equations that read one layer's parameters, by first and last number."""

    layer: Layer
    first: int
    last: int


class _Program:
    """A traced function, and the layer that owns each of its inputs."""

    def __init__(self, closed: Any, owners: Sequence[Layer | None]) -> None:
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.owner: dict[Any, Layer] = {
            variable: owner
            for variable, owner in zip(self.jaxpr.invars, owners, strict=True)
            if owner is not None
        }

    def run(self, arrays: Sequence[Any], remat: RematPolicy) -> list[Any]:
        """Evaluate the program segment by segment."""
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
        """Return the equation numbers at which segments end."""
        ends: list[int] = []
        visits = self._visits()
        alive = self._bytes_alive()
        layers = 1
        for before, after in pairwise(visits):
            changes = before.layer.numbered != after.layer.numbered
            if changes or layers == every:
                between = range(before.last + 1, after.first + 1)
                ends.append(min(between, key=lambda place: alive[place]))
                layers = 0
            layers += 1
        return ends

    def _visits(self) -> list[_Visit]:
        """Return the order of layers; equations that only reshape parameters do not count."""
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
        """Return the bytes of activations that are alive before each equation."""
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
        """Return equations `start` to `stop` as a program of their inputs and used outputs."""
        equations = [self._checkpointed(eqn, remat) for eqn in self.jaxpr.eqns[start:stop]]
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

    def _checkpointed(self, equation: Any, remat: RematPolicy) -> Any:
        """Return a scan over stacked layers with checkpointed iterations, or the equation."""
        if equation.primitive.name != "scan":
            return equation
        unscanned = sum(equation.params.get(name, 0) for name in ("num_consts", "num_carry"))
        if not any(variable in self.owner for variable in _variables(equation.invars[unscanned:])):
            return equation
        body = equation.params["jaxpr"]
        iteration = remat.wrap(core.jaxpr_as_fun(body), in_loop=True)
        shapes = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=getattr(one, "weak_type", False))
            for one in body.in_avals
        ]
        made = jax.make_jaxpr(iteration)(*shapes)
        return equation.replace(params={**equation.params, "jaxpr": made})


def _opened(closed: Any, owners: Sequence[Layer | None], arrays: Sequence[Any]) -> Any:
    """Return the trace with calls that contain several layers inlined, such as jax.jit models."""
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
    """Whether the equation is a call that reads the parameters of several layers."""
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
