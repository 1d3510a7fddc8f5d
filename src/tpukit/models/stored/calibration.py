"""Find a model's matrices, and collect what their inputs look like: XᵀX of each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .product import MatrixAxes, StoredProduct
from .spread import Spread, on_host
from .tracked import Multiplied, StoredLeaf, Tracked
from .view import View
from .walk import walk


@dataclass(frozen=True, slots=True)
class ModelMatrix:
    """One matrix of a model.

    Attributes:
        path: Of its parameter in the tree.
        index: Of the matrix in its parameter, where that is a stack.
        axes: What the parameter's axes are.
        turn: When it is first multiplied: 0 comes first.
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
        """Its place among the matrices of its parameter."""
        place = 0
        for size, at in zip(self.axes.stack_shape, self.index, strict=True):
            place = place * size + at
        return place


@dataclass(frozen=True)
class InputStatistics:
    """What a matrix was multiplied with.

    Attributes:
        gram: XᵀX (inputs, inputs), float32, summed over all rows; of a mesh, on the host.
        rows: How many rows that were.
    """

    gram: jax.Array | np.ndarray
    rows: int

    @property
    def hessian(self) -> jax.Array:
        """XᵀX of a mean row."""
        return jnp.asarray(self.gram) / max(1, self.rows)


def path_text(path: Any) -> str:
    """The path of a leaf, as rules match it: "layers/attention/q_proj/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclass(frozen=True)
class ModelMatrices:
    """All matrices of a model in the order of their turns, and what was not understood.

    Attributes:
        found: The matrices.
        products: The products, and which matrix each step and batch element of one takes.
        refused: Parameters that products take in a way nobody can quantize, and why.
    """

    found: tuple[ModelMatrix, ...]
    products: Mapping[StoredProduct, tuple[str, ...]]
    refused: Mapping[str, str]


def find_matrices(apply: Callable[..., Any], params: Any, *args: Any) -> ModelMatrices:
    """Every parameter that `apply(params, *args)` multiplies something with.

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
            refused[path] = "a product takes a piece of it"
        elif axes.setdefault(product.leaf, seen) != seen:
            refused[path] = "it is multiplied from both sides"
    for leaf, shape in enumerate(shapes):
        if leaf not in axes and sum(size > 1 for size in shape) > 1:
            refused.setdefault(paths[leaf], "it is looked up, or used in no product of this kind")
    turns: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    taken: dict[StoredProduct, tuple[str, ...]] = {}
    for place, product in enumerate(recorder.order):
        if paths[product.leaf] in refused:
            continue
        indices = product.stack_indices(axes[product.leaf]) or []
        for step, index in enumerate(indices):
            # Products of one loop come in its turns: all of step 0 before any of step 1.
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
    params: Any,
    batches: Iterable[Any],
    matrices: ModelMatrices,
    *,
    only: Iterable[str] | None = None,
    spread: Spread | None = None,
) -> dict[str, InputStatistics]:
    """XᵀX of what each matrix is multiplied with, summed over batches.

    Batches are read one at a time; what is kept is a square matrix of float32 for each of `only`
    (and for its neighbours in a loop over layers, which are measured together). On a mesh its rows
    are split over all devices.

    Args:
        apply: (params, batch) -> anything.
        params: A tree of arrays.
        batches: What `apply` takes, one after another; shapes may differ.
        matrices: Of `find_matrices`.
        only: Names of matrices; all by default.
        spread: Devices that share each batch and add up what they see; one device by default.
    """
    wanted = {one.name for one in matrices.found} if only is None else set(only)
    products = {p for p, names in matrices.products.items() if wanted.intersection(names)}

    def measured(params: Any, batch: Any) -> Any:
        recorder = _Recorder(measure=True, only=products, spread=spread)
        _through_values(apply, params, (batch,), recorder)
        return recorder.statistics

    run: dict[Any, Any] = {}
    totals: dict[StoredProduct, Any] = {}
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
                # From a mesh to the host: one device could not hold those of all matrices.
                new = one if spread is None else on_host(one)
                found[name] = InputStatistics(old.gram + new, old.rows + int(count))
    return found


def _add(old: Any, new: Any) -> Any:
    return jax.tree.map(jnp.add, old, new)


def _compiled(function: Callable[..., Any]) -> Callable[..., dict[StoredProduct, Any]]:
    """The function under jit; its result's keys are products, which are no tree of jax's."""
    keys: list[StoredProduct] = []

    def values(params: Any, batch: Any) -> Any:
        found = function(params, batch)
        keys[:] = list(found)
        return list(found.values())

    jitted = jax.jit(values)

    def run(params: Any, batch: Any) -> dict[StoredProduct, Any]:
        results = jitted(params, batch)
        return dict(zip(keys, results, strict=True))

    return run


def _through(apply: Any, params: Any, args: Any, recorder: "_Recorder") -> None:
    jax.eval_shape(lambda p, a: _through_values(apply, p, a, recorder) and None, params, args)


def _through_values(apply: Any, params: Any, args: Any, recorder: "_Recorder") -> None:
    closed = jax.make_jaxpr(apply)(params, *args)
    flat = jax.tree.leaves(params)
    tracked = [
        Tracked(StoredLeaf(number), View.whole(leaf.shape), leaf.dtype, lambda leaf=leaf: leaf)
        for number, leaf in enumerate(flat)
    ]
    walk(closed.jaxpr, closed.consts, [*tracked, *jax.tree.leaves(args)], recorder)


class _Recorder:
    """Notes every product, and measures its inputs."""

    records = True

    def __init__(
        self, *, measure: bool, only: set[StoredProduct] | None = None, spread: Spread | None = None
    ) -> None:
        self._measure, self._only, self._spread = measure, only, spread
        self.statistics: dict[StoredProduct, Any] = {}
        self.order: list[StoredProduct] = []
        self.first_of_loop: dict[StoredProduct, StoredProduct] = {}
        self._last: list[StoredProduct] = []

    def product(self, found: Multiplied, multiply: Callable[[Any, Any], Any]) -> Any:
        """See `Visitor`."""
        product = StoredProduct(found.weight.leaf.number, found.weight.view, found.contraction)
        if product not in self.order:
            self.order.append(product)
            self.first_of_loop[product] = product
        if self._measure and (self._only is None or product in self._only):
            gram, rows = _gram(found)
            seen = (gram if self._spread is None else self._spread.gram(gram)), rows
            old = self.statistics.get(product)
            self.statistics[product] = seen if old is None else _add(old, seen)
        return multiply(found.x, found.weight.get())

    def enter_loop(self) -> tuple[dict[StoredProduct, Any], int]:
        """See `Visitor`."""
        outside, self.statistics = self.statistics, {}
        return outside, len(self.order)

    def leave_loop(self, entered: tuple[dict[StoredProduct, Any], int]) -> list[Any]:
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


def _gram(found: Multiplied) -> tuple[jax.Array, jax.Array]:
    """XᵀX (batch…, inputs, inputs) and the number of rows, as the loops around stack them."""
    x, view = found.x, found.weight.view
    own, other = found.contraction, found.x_contraction
    # The inputs in the order they have in the parameter, whatever order the product has them in.
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
