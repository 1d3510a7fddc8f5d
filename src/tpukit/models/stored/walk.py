"""Walk through a traced program and visit every matmul that takes a parameter.

A program is anything that jax traces, so no framework is involved. Parameters are followed through
operations that only move their elements (`view`), into calls and loops, to the `dot_general` that
multiplies them. A `Visitor` decides what happens there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from .parameter import StoredParameter
from .view import Contraction, View


@dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A parameter of the program.

    Attributes:
        number: Its number among all parameters.
        stored: The stored parameter; None for an array.
    """

    number: int
    stored: StoredParameter | None = None


@dataclass(frozen=True, eq=False)
class Tracked:
    """A value that is a view of a parameter; `get` returns the array where it is needed."""

    leaf: StoredLeaf
    view: View
    dtype: Any
    get: Callable[[], jax.Array]


@dataclass(frozen=True, eq=False)
class WeightMatmul:
    """A `dot_general` with a tracked weight.

    Attributes:
        weight: The tracked operand.
        x: The other operand.
        weight_first: Whether the weight is the first operand.
        contraction: The axes of the weight.
        x_contraction: The corresponding axes of the other operand.
    """

    weight: Tracked
    x: jax.Array
    weight_first: bool
    contraction: Contraction
    x_contraction: Contraction


def tracked_parameter(leaf: StoredLeaf, view: View, dtype: Any) -> Tracked:
    """Return the tracked value of a stored parameter."""
    stored = leaf.stored
    assert stored is not None
    return Tracked(leaf, view, dtype, lambda: stored.dense(view).astype(dtype))


class Visitor(Protocol):
    """The actions at matmuls of a walk."""

    @property
    def records(self) -> bool:
        """Whether the visitor keeps traced values, which cannot leave a checkpointed segment."""
        ...

    def matmul(self, found: WeightMatmul, multiply: Callable[[Any, Any], Any]) -> Any:
        """Return the result of a matmul; `multiply(x, weight)` is the original operation."""
        ...

    def enter_loop(self) -> Any:
        """Start the body of a scan; `leave_loop` gets the returned value."""
        ...

    def leave_loop(self, entered: Any) -> Any:
        """End the body; return its recorded arrays, which the scan stacks."""
        ...

    def after_loop(self, recorded: Any) -> None:
        """Receive the recorded arrays, stacked over all iterations."""
        ...


def plain(value: Any) -> Any:
    """Return the array of a tracked or untracked value."""
    return value.get() if isinstance(value, Tracked) else value


# Names of call primitives that are walked through in place.
_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "remat"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
# Call primitives that are recomputed for gradients.
_CHECKPOINTS = ("checkpoint", "remat2", "remat")
_JAXPRS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def walk(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], visitor: Visitor) -> Any:
    """Run a jaxpr on values that may be `Tracked`, as may the results."""
    known: dict[Any, Any] = {}

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else known[var]

    known.update(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        with eqn.ctx.manager:
            results = _run(eqn, [read(var) for var in eqn.invars], visitor)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _run(eqn: Any, values: list[Any], visitor: Visitor) -> Sequence[Any]:
    name = eqn.primitive.name
    tracked = [value for value in values if isinstance(value, Tracked)]
    if not tracked:
        if all(_is_scalar(value) for value in values):
            if name == "sharding_constraint":  # a scalar constant has no sharding
                return values
            with jax.ensure_compile_time_eval():
                return _bind(eqn, values)
        return _bind(eqn, values)
    if name in _CALLS:
        return _call(eqn, values, visitor)
    if name == "scan":
        return _scan(eqn.params, values, visitor)
    if name == "while":
        return _while(eqn.params, values, visitor)
    if name == "cond":
        return _cond(eqn.params, values, visitor)
    if name == "dot_general" and len(tracked) == 1:
        return [_matmul(eqn, values, visitor)]
    if len(tracked) == 1 and isinstance(values[0], Tracked):
        moved = _moved_view(name, eqn.params, values[0].view, values[1:])
        if moved is not None:
            one, dtype = values[0], eqn.outvars[0].aval.dtype

            def get() -> jax.Array:
                return _bind(eqn, [one.get(), *values[1:]])[0]

            return [Tracked(one.leaf, moved, dtype, get)]
    return _bind(eqn, [plain(value) for value in values])


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tracer) and np.ndim(value) == 0


def _bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    given = eqn.primitive.get_bind_params(eqn.params)
    # Some versions of jax return functions separately from the parameters.
    functions, params = given if isinstance(given, tuple) else ((), given)
    result = eqn.primitive.bind(*functions, *values, **params)
    return result if eqn.primitive.multiple_results else [result]


def _moved_view(name: str, params: Any, view: View, others: Sequence[Any]) -> View | None:
    """Return the view after an operation that only moves elements, or None for others."""
    match name:
        case "convert_element_type" | "copy" | "copy_p" | "sharding_constraint":
            return view
        case "transpose":
            return view.transposed(params["permutation"])
        case "squeeze":
            return view.squeezed(params["dimensions"])
        case "reshape" if params.get("dimensions") is None:
            return view.reshaped(params["new_sizes"])
        case "broadcast_in_dim":
            return view.expanded(params["shape"], params["broadcast_dimensions"])
        case "slice":
            return view.sliced(params["start_indices"], params["limit_indices"], params["strides"])
        case "dynamic_slice" if all(map(_is_scalar, others)):
            sizes = params["slice_sizes"]
            bounds = zip(others, view.shape, sizes, strict=True)
            starts = [min(max(int(start), 0), n - size) for start, n, size in bounds]
            return view.sliced(starts, [a + b for a, b in zip(starts, sizes, strict=True)])
        case _:
            return None


def _matmul(eqn: Any, values: list[Any], visitor: Visitor) -> Any:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    sides = (
        Contraction(tuple(left), tuple(left_batch)),
        Contraction(tuple(right), tuple(right_batch)),
    )
    first = isinstance(values[0], Tracked)
    weight, x = values if first else values[::-1]

    def multiply(x: Any, matrix: Any) -> Any:
        return _bind(eqn, [matrix, x] if first else [x, matrix])[0]

    own, other = sides if first else sides[::-1]
    return visitor.matmul(WeightMatmul(weight, x, first, own, other), multiply)


def _call(eqn: Any, values: list[Any], visitor: Visitor) -> Sequence[Any]:
    called = next(eqn.params[key] for key in _JAXPRS if key in eqn.params)
    jaxpr, consts = _opened(called)
    if eqn.primitive.name not in _CHECKPOINTS or visitor.records:
        return walk(jaxpr, consts, values, visitor)
    # Stored parameters enter the segment quantized and are decoded again for gradients.
    arrays = [value for value in values if not isinstance(value, Tracked)]

    def inside(arrays: list[Any]) -> list[Any]:
        rest = iter(arrays)
        given = [value if isinstance(value, Tracked) else next(rest) for value in values]
        return [plain(value) for value in walk(jaxpr, consts, given, visitor)]

    how = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(inside, **how)(arrays)


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _scan(params: Any, values: list[Any], visitor: Visitor) -> Sequence[Any]:
    fixed, carried = _loop_sizes(params)
    consts, carry, xs = values[:fixed], values[fixed : fixed + carried], values[fixed + carried :]
    length, backwards = params["length"], params["reverse"]
    jaxpr, own = _opened(params["jaxpr"])
    carry, pieces = [plain(value) for value in carry], []
    for first, last in _segments(xs, length):
        count = last - first
        cut = [_cut(value, first, last) for value in xs]

        def body(carry: Any, now: Any, cut: Any = cut) -> Any:
            entered = visitor.enter_loop()
            inputs = [one.step(value) for one, value in zip(cut, now, strict=True)]
            out = [plain(value) for value in walk(jaxpr, own, [*consts, *carry, *inputs], visitor)]
            return out[:carried], (out[carried:], visitor.leave_loop(entered))

        carry, (ys, recorded) = jax.lax.scan(
            body, carry, [one.xs for one in cut], length=count, reverse=backwards
        )
        visitor.after_loop(recorded)
        pieces.append(ys)
    # A reversed scan also stacks its results in the order of the iterations.
    joined = [jnp.concatenate(parts) for parts in zip(*pieces, strict=True)]
    return [*carry, *(joined if len(pieces) > 1 else pieces[0])]


def _segments(xs: Sequence[Any], length: int) -> list[tuple[int, int]]:
    """Return ranges of iterations in which every stored parameter has the same formats."""
    stored = [v for v in xs if isinstance(v, Tracked) and v.leaf.stored is not None]
    starts = [0]
    for step in range(1, length):
        if any(_structure(v, step) != _structure(v, step - 1) for v in stored):
            starts.append(step)
    return list(zip(starts, [*starts[1:], length], strict=True))


def _structure(value: Tracked, step: int) -> Any:
    assert value.leaf.stored is not None
    found = value.leaf.stored.reach(value.view.at(step))
    if found is None:
        return None
    if (run := value.leaf.stored.run_of(found)) is not None:
        return found.numbers[0] - run[1]  # where the run begins
    leaves, tree = jax.tree.flatten(value.leaf.stored.reached(found))
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@dataclass(frozen=True, eq=False)
class _Cut:
    """A range of a scan's inputs: arrays with a leading axis, and a function for one iteration."""

    xs: Any
    step: Callable[[Any], Any]


def _cut(value: Any, first: int, last: int) -> _Cut:
    if not isinstance(value, Tracked):
        whole = last - first == value.shape[0]
        return _Cut(value if whole else value[first:last], lambda now: now)
    stored, view = value.leaf.stored, value.view
    found = [] if stored is None else [stored.reach(view.at(step)) for step in range(first, last)]
    if stored is None or None in found:
        # As a plain array, without its stored form.
        inner, leaf = view.in_loop(), StoredLeaf(value.leaf.number)
        return _Cut(
            value.get()[first:last], lambda now: Tracked(leaf, inner, value.dtype, lambda: now)
        )
    reaches = [one for one in found if one is not None]
    reached = reaches[0]

    def step(now: Any) -> Tracked:
        piece = stored.piece(reached, now)
        return tracked_parameter(StoredLeaf(value.leaf.number, piece), reached.view, value.dtype)

    runs = [run for one in reaches if (run := stored.run_of(one)) is not None]
    if len(runs) == len(reaches):
        stack = runs[0][0]
        starts = np.array([start for _, start in runs], np.int32)
        return _Cut(starts, lambda now: step(stack.some(now, len(reached.numbers))))
    each = [stored.reached(one) for one in reaches]
    return _Cut(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), step)


def _loop_sizes(params: Any) -> tuple[int, int]:
    """Return the numbers of constants and carries of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    fixed, carried, _ = params["ft_in"].unpack()  # from jax 0.11 on
    return len(fixed), len(carried)


def _while(params: Any, values: list[Any], visitor: Visitor) -> Sequence[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    asked, used = values[:n_cond], values[n_cond : n_cond + n_body]
    start = [plain(value) for value in values[n_cond + n_body :]]
    cond, cond_own = _opened(params["cond_jaxpr"])
    body, body_own = _opened(params["body_jaxpr"])

    def goes_on(state: Any) -> Any:
        return plain(walk(cond, cond_own, [*asked, *state], visitor)[0])

    def once(state: Any) -> Any:
        # The number of iterations is unknown, so recorded values cannot leave the body.
        entered = visitor.enter_loop()
        out = [plain(value) for value in walk(body, body_own, [*used, *state], visitor)]
        visitor.leave_loop(entered)
        return out

    return jax.lax.while_loop(goes_on, once, start)


def _cond(params: Any, values: list[Any], visitor: Visitor) -> Sequence[Any]:
    which, operands = plain(values[0]), values[1:]

    def branch(closed: Any) -> Callable[[], Any]:
        def run() -> Any:
            entered = visitor.enter_loop()
            jaxpr, own = _opened(closed)
            out = [plain(value) for value in walk(jaxpr, own, operands, visitor)]
            visitor.leave_loop(entered)
            return out

        return run

    return jax.lax.switch(which, [branch(closed) for closed in params["branches"]])
