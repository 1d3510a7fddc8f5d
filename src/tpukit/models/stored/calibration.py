"""Find a model's matrices, and collect statistics of their inputs: XᵀX per matrix."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from .placement import Spread, on_host
from .view import MatrixAxes, StoredMatmul, View
from .walk import StoredLeaf, Tracked, WeightMatmul, walk


@dataclass(frozen=True, slots=True)
class ModelMatrix:
    """One matrix of a model.

    Attributes:
        path: The path of its parameter in the tree.
        index: The index of the matrix in its parameter, where that is a stack.
        axes: The axes of the parameter.
        turn: Its place in the order in which matrices are first multiplied, from 0.
    """

    path: str
    index: tuple[int, ...]
    axes: MatrixAxes
    turn: int

    @property
    def name(self) -> str:
        """The path, and the index where there is one."""
        return self.path + "".join(f"[{number}]" for number in self.index)

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        return self.axes.rows, self.axes.columns

    @property
    def number(self) -> int:
        """The number of the matrix within its parameter."""
        place = 0
        for size, at in zip(self.axes.stack_shape, self.index, strict=True):
            place = place * size + at
        return place


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of the inputs of a matrix.

    Attributes:
        gram: XᵀX (inputs, inputs) in float32, summed over all rows; on the host for a mesh.
        rows: The number of rows.
    """

    gram: jax.Array | np.ndarray
    rows: int

    @property
    def hessian(self) -> jax.Array:
        """XᵀX divided by the number of rows."""
        return jnp.asarray(self.gram) / max(1, self.rows)


def path_text(path: Any) -> str:
    """Return the path of a leaf as text: "layers/attention/q_proj/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclass(frozen=True)
class ModelMatrices:
    """All matrices of a model in the order of their use, and the parameters that are none.

    Attributes:
        found: The matrices.
        products: The matmuls, with the matrix of each scan iteration and batch element.
        refused: Parameters that cannot be quantized because of how they are used, with reasons.
    """

    found: tuple[ModelMatrix, ...]
    products: Mapping[StoredMatmul, tuple[str, ...]]
    refused: Mapping[str, str]


def find_matrices(apply: Callable[..., Any], params: PyTree, *args: PyTree) -> ModelMatrices:
    """Return every parameter that `apply(params, *args)` uses as a matrix of a matmul.

    Nothing is computed; arrays may be shapes.
    """
    recorder = _Recorder(measure=False)
    _through(apply, params, args, recorder)
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    paths = [path_text(path) for path, _ in named]
    shapes = [tuple(leaf.shape) for _, leaf in named]
    axes: dict[int, MatrixAxes] = {}
    refused: dict[str, str] = {}
    for product in recorder.order:
        seen = product.matrix_axes(shapes[product.leaf])
        path = paths[product.leaf]
        if seen is None or product.stack_indices(seen) is None:
            refused[path] = "a matmul uses a part of it"
        elif axes.setdefault(product.leaf, seen) != seen:
            refused[path] = "it is multiplied from both sides"
    for leaf, shape in enumerate(shapes):
        if leaf not in axes and sum(size > 1 for size in shape) > 1:
            refused.setdefault(paths[leaf], "it is looked up, or used in no matmul")
    turns: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    taken: dict[StoredMatmul, tuple[str, ...]] = {}
    for place, product in enumerate(recorder.order):
        if paths[product.leaf] in refused:
            continue
        indices = product.stack_indices(axes[product.leaf]) or []
        for step, index in enumerate(indices):
            # Matmuls of one scan are ordered by iteration: all of iteration 0 before iteration 1.
            first = recorder.order.index(recorder.first_of_loop[product])
            turns.setdefault((product.leaf, index), (first, step, place))
        taken[product] = tuple(
            ModelMatrix(paths[product.leaf], index, axes[product.leaf], 0).name for index in indices
        )
    ordered = sorted(turns, key=lambda key: turns[key])
    found = tuple(
        ModelMatrix(paths[leaf], index, axes[leaf], turn)
        for turn, (leaf, index) in enumerate(ordered)
    )
    return ModelMatrices(found, taken, refused)


def collect_statistics(
    apply: Callable[..., Any],
    params: PyTree,
    batches: Iterable[Any],
    matrices: ModelMatrices,
    *,
    only: Iterable[str] | None = None,
    spread: Spread | None = None,
) -> dict[str, InputStatistics]:
    """Return XᵀX of the inputs of each matrix, summed over batches.

    Batches are read one at a time. A square float32 matrix is kept for each matrix of `only`, and
    for its neighbours in a scan over layers, which are measured together. On a mesh its rows are
    sharded over all devices.

    Args:
        apply: (params, batch) -> anything.
        params: A tree of arrays.
        batches: Arguments of `apply`; shapes may differ.
        matrices: The result of `find_matrices`.
        only: Names of matrices; all by default.
        spread: The devices that share each batch; one device by default.
    """
    wanted = {one.name for one in matrices.found} if only is None else set(only)
    products = {p for p, names in matrices.products.items() if wanted.intersection(names)}

    def measured(params: PyTree, batch: PyTree) -> Any:
        recorder = _Recorder(measure=True, only=products, spread=spread)
        _through_values(apply, params, (batch,), recorder)
        return recorder.statistics

    run: dict[Any, Any] = {}
    totals: dict[StoredMatmul, Any] = {}
    params = params if spread is None else spread.params(params)
    for batch in batches:
        batch = jax.tree.map(jnp.asarray, batch)
        batch = batch if spread is None else spread.batch(batch)
        key = jax.tree.structure(batch), tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if key not in run:
            run[key] = _compiled(measured)
        seen = run[key](params, batch)
        totals = seen if not totals else {p: _add(totals[p], new) for p, new in seen.items()}
    found: dict[str, InputStatistics] = {}
    for product, total in totals.items():
        gram, rows = total
        width = gram.shape[-1]
        each = gram.reshape(-1, width, width)
        counts = np.broadcast_to(on_host(rows), gram.shape[:-2]).reshape(-1)
        for name, one, count in zip(matrices.products[product], each, counts, strict=True):
            if name in wanted:
                old = found.get(name, InputStatistics(np.zeros((), np.float32), 0))
                # Moved from a mesh to the host, because one device could not hold all of them.
                new = one if spread is None else on_host(one)
                found[name] = InputStatistics(old.gram + new, old.rows + int(count))
    return found


def _add(old: Any, new: Any) -> Any:
    return jax.tree.map(jnp.add, old, new)


def _compiled(function: Callable[..., Any]) -> Callable[..., dict[StoredMatmul, Any]]:
    """Return the function under jit; the keys of its result are matmuls, not a jax tree."""
    keys: list[StoredMatmul] = []

    def values(params: PyTree, batch: PyTree) -> Any:
        found = function(params, batch)
        keys[:] = list(found)
        return list(found.values())

    jitted = jax.jit(values)

    def run(params: PyTree, batch: PyTree) -> dict[StoredMatmul, Any]:
        results = jitted(params, batch)
        return dict(zip(keys, results, strict=True))

    return run


def _through(apply: Any, params: PyTree, args: PyTree, recorder: "_Recorder") -> None:
    jax.eval_shape(lambda p, a: _through_values(apply, p, a, recorder) and None, params, args)


def _through_values(apply: Any, params: PyTree, args: PyTree, recorder: "_Recorder") -> None:
    closed = jax.make_jaxpr(apply)(params, *args)
    flat = jax.tree.leaves(params)
    tracked = [
        Tracked(StoredLeaf(number), View.whole(leaf.shape), leaf.dtype, lambda leaf=leaf: leaf)
        for number, leaf in enumerate(flat)
    ]
    walk(closed.jaxpr, closed.consts, [*tracked, *jax.tree.leaves(args)], recorder)


class _Recorder:
    """Records every matmul, and measures its inputs."""

    records = True

    def __init__(
        self, *, measure: bool, only: set[StoredMatmul] | None = None, spread: Spread | None = None
    ) -> None:
        self._measure, self._only, self._spread = measure, only, spread
        self.statistics: dict[StoredMatmul, Any] = {}
        self.order: list[StoredMatmul] = []
        self.first_of_loop: dict[StoredMatmul, StoredMatmul] = {}
        self._last: list[StoredMatmul] = []

    def matmul(self, found: WeightMatmul, multiply: Callable[[Any, Any], Any]) -> Any:
        """See `Visitor`."""
        product = StoredMatmul(found.weight.leaf.number, found.weight.view, found.contraction)
        if product not in self.order:
            self.order.append(product)
            self.first_of_loop[product] = product
        if self._measure and (self._only is None or product in self._only):
            gram, rows = _gram(found)
            seen = (gram if self._spread is None else self._spread.gram(gram)), rows
            old = self.statistics.get(product)
            self.statistics[product] = seen if old is None else _add(old, seen)
        return multiply(found.x, found.weight.get())

    def enter_loop(self) -> tuple[dict[StoredMatmul, Any], int]:
        """See `Visitor`."""
        outside, self.statistics = self.statistics, {}
        return outside, len(self.order)

    def leave_loop(self, entered: tuple[dict[StoredMatmul, Any], int]) -> list[Any]:
        """See `Visitor`."""
        outside, before = entered
        recorded, self.statistics = self.statistics, outside
        self._last = list(recorded)
        for product in self.order[before:]:
            self.first_of_loop[product] = self.first_of_loop[self.order[before]]
        return list(recorded.values())

    def after_loop(self, recorded: list[Any]) -> None:
        """See `Visitor`."""
        self.statistics |= dict(zip(self._last, recorded, strict=True))


def _gram(found: WeightMatmul) -> tuple[jax.Array, jax.Array]:
    """Return XᵀX (batch…, inputs, inputs) and the number of rows."""
    x, view = found.x, found.weight.view
    own, other = found.contraction, found.x_contraction
    # The inputs are put in the order of the parameter, which may differ from the matmul's order.
    order = sorted(range(len(own.contracted)), key=lambda i: -view.strides[own.contracted[i]])
    inner = [other.contracted[i] for i in order]
    free = [a for a in range(x.ndim) if a not in (*inner, *other.batch)]
    turned = jnp.transpose(x, (*other.batch, *free, *inner))
    batch = turned.shape[: len(other.batch)]
    rows = 1
    for axis in free:
        rows *= x.shape[axis]
    flat = turned.reshape(*batch, rows, -1).astype(jnp.float32)
    gram = jnp.einsum("...ri,...rj->...ij", flat, flat, precision=jax.lax.Precision.HIGHEST)
    return gram, jnp.full(batch, rows, jnp.int32)
