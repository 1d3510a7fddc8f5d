"""Find the integers that Pallas calls take: grid bounds, mask tables, group offsets.

They decide how often a kernel's loops run. A program computes them from constants and from a few
integer arguments, so they are found by evaluating only what they depend on, on the CPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import numpy as np

_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = (
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2",
    "checkpoint", "custom_vjp_call_jaxpr",
)  # fmt: skip
_UNKNOWN = object()
_LARGEST_TABLE = 2**18  # elements; scalar memory is not larger
_Value = Callable[[], Any]


@dataclass(frozen=True)
class PallasCall:
    """One Pallas call of a traced function.

    Attributes:
        shapes: Shapes of its operands.
        integers: Values of the small integer operands that are known, by operand number.
    """

    shapes: tuple[tuple[int, ...], ...]
    integers: Mapping[int, Any] = field(repr=False)


def find_pallas_calls(
    function: Callable[..., Any], arguments: Sequence[Any], known: Mapping[int, Any]
) -> list[PallasCall]:
    """Return every Pallas call of a function, with its known integer operands.

    Args:
        function: Traced, not run.
        arguments: Shapes or arrays.
        known: Values of flat arguments, by position.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    inputs = [
        (lambda value=known[index]: value) if index in known else _nothing
        for index in range(len(traced.jaxpr.invars))
    ]
    return list(_Scope(traced.jaxpr, traced.consts, inputs).calls())


def _nothing() -> Any:
    return _UNKNOWN


class _Scope:
    """One jaxpr, whose values are computed on demand."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value]) -> None:
        self._jaxpr = jaxpr
        self._known: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        self._known.update(
            (name, lambda value=value: value)
            for name, value in zip(jaxpr.constvars, consts, strict=True)
        )
        self._made = {
            out: (equation, index)
            for equation in jaxpr.eqns
            for index, out in enumerate(equation.outvars)
        }
        self._results: dict[int, Sequence[Any]] = {}

    def value(self, atom: Any) -> Any:
        """Return the value of a variable or literal, or `_UNKNOWN`."""
        if hasattr(atom, "val"):
            return atom.val
        if atom in self._known:
            return self._known[atom]()
        if atom not in self._made:
            return _UNKNOWN
        equation, index = self._made[atom]
        if id(equation) not in self._results:
            self._results[id(equation)] = self._evaluate(equation)
        return self._results[id(equation)][index]

    def _evaluate(self, equation: Any) -> Sequence[Any]:
        inner = self._inside(equation)
        if inner is not None:
            return [inner.value(out) for out in inner._jaxpr.outvars]
        values = [self.value(atom) for atom in equation.invars]
        if equation.primitive.name == "pallas_call" or any(value is _UNKNOWN for value in values):
            return [_UNKNOWN] * len(equation.outvars)
        inputs = [
            (atom, value)
            for atom, value in zip(equation.invars, values, strict=True)
            if not hasattr(atom, "val")
        ]
        alone = self._jaxpr.replace(
            constvars=[],
            invars=[atom for atom, _ in inputs],
            eqns=[equation],
            outvars=equation.outvars,
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        return jax.core.eval_jaxpr(alone, (), *(value for _, value in inputs))

    def _inside(self, equation: Any) -> "_Scope | None":
        """Return the scope of a plain call, with the equation's inputs."""
        if equation.primitive.name not in _CALLS:
            return None
        jaxpr = next((equation.params[key] for key in _INNER if key in equation.params), None)
        if jaxpr is None:
            return None
        return self._enter(jaxpr, equation.invars)

    def _enter(self, jaxpr: Any, atoms: Sequence[Any]) -> "_Scope":
        plain, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        inputs = [(lambda atom=atom: self.value(atom)) for atom in atoms]
        missing = len(plain.invars) - len(inputs)
        return _Scope(plain, consts, [*inputs, *[_nothing] * missing][: len(plain.invars)])

    def calls(self) -> Iterator[PallasCall]:
        """Yield the Pallas calls of this jaxpr and of all jaxprs it calls."""
        for equation in self._jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield self._pallas_call(equation)
                continue
            inner = self._inside(equation)
            if inner is not None:
                yield from inner.calls()
                continue
            for jaxpr, atoms in _bodies(equation):
                yield from self._enter(jaxpr, atoms).calls()

    def _pallas_call(self, equation: Any) -> PallasCall:
        values = {
            index: self.value(atom)
            for index, atom in enumerate(equation.invars)
            if np.issubdtype(atom.aval.dtype, np.integer) and atom.aval.size <= _LARGEST_TABLE
        }
        return PallasCall(
            tuple(tuple(atom.aval.shape) for atom in equation.invars),
            {index: np.asarray(value) for index, value in values.items() if value is not _UNKNOWN},
        )


def _bodies(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the jaxprs of a loop or conditional, with their loop-invariant inputs."""
    if equation.primitive.name == "cond":
        for branch in equation.params["branches"]:
            yield branch, equation.invars[1:]
    elif equation.primitive.name == "split_call":
        for candidate in equation.params["jaxprs"]:
            yield candidate, equation.invars
    elif equation.primitive.name == "scan":
        yield equation.params["jaxpr"], equation.invars[: equation.params["num_consts"]]
    else:
        for parameter in equation.params.values():
            for item in parameter if isinstance(parameter, tuple) else (parameter,):  # pyright: ignore[reportUnknownVariableType]
                if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                    yield item, ()
