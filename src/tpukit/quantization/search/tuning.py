"""Tune a quantized model towards the full model's outputs on calibration data.

Each matrix is quantized for the error of its own output. Tuning lowers their joint error on the
model's output, at the same number of bytes: Adam on the KL divergence, as in the last step of AQLM
and QuIP# (arXiv 2401.06118, 2402.04396). Codebook entries, scales and all arrays that are not
quantized are trained in float32; the forward pass rounds them as they are stored, and gradients
skip the rounding. Vector codes can change as well (see `shadows`). The last part of the calibration
data is held out, and the step that is best there is kept, so a useless tuning changes nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware.formats import INT8
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from ...kernels.rounding import round_to_bound
from ...models.stored.placement import Spread
from ...models.stored.running import dense_parameters
from ...runtime.progress import Counted, Progress, silent
from ...shown import Shown
from ..measures.evaluation import divergence, measure_of
from ..subject import Subject, held_out
from ..vector_codes.vq_array import VQArray
from .shadows import Moves, Shadows, pulled, share_recoded

# Of every array that can be trained, in units of its size.
Changes: TypeAlias = tuple[jax.Array, ...]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("start", "sizes", "kept"),
    meta_fields=("places", "structure"),
)
@dataclass(frozen=True, eq=False)
class Continuous:
    """The trainable arrays of a tree, and all its other leaves, as a pytree.

    Attributes:
        start: Initial values in float32.
        sizes: Root mean square of each array, the unit of its changes; an array of zeros stays.
        kept: All leaves of the tree as stored.
        places: Positions of the trainable leaves among them.
        structure: Structure of the tree.
    """

    start: tuple[jax.Array, ...]
    sizes: tuple[jax.Array, ...]
    kept: tuple[Any, ...]
    places: tuple[int, ...]
    structure: Any

    @classmethod
    def of(cls, params: PyTree) -> "Continuous":
        """Collect the arrays of parameters."""
        kept, structure = jax.tree.flatten(params)
        marks = jax.tree.leaves(jax.tree.map(_trainable, params, is_leaf=_is_coded))
        places = tuple(place for place, mark in enumerate(marks) if mark)
        start = tuple(jnp.asarray(kept[place], jnp.float32) for place in places)
        sizes = tuple(jnp.sqrt(jnp.mean(array**2)) for array in start)
        return cls(start, sizes, tuple(kept), places, structure)

    @property
    def unchanged(self) -> Changes:
        """Return zero changes."""
        return tuple(map(jnp.zeros_like, self.start))

    @property
    def tree(self) -> PyTree:
        """Return the tree as stored."""
        return self.structure.unflatten(self.kept)

    def with_kept(self, tree: PyTree) -> "Continuous":
        """Return the same trainable arrays with the codes of another tree."""
        kept, structure = jax.tree.flatten(tree)
        return replace(self, kept=tuple(kept), structure=structure)

    def params(self, changes: Changes) -> PyTree:
        """Return the tree with changed arrays, as floats with their stored (rounded) values.

        Gradients skip the rounding.
        """
        return self._with([_as_kept(array, kept) for array, kept in self._changed(changes)])

    def stored(self, changes: Changes) -> PyTree:
        """Return the tree with changed arrays, as stored."""
        return self._with([_rounded(array, kept) for array, kept in self._changed(changes)])

    def _changed(self, changes: Changes) -> list[tuple[jax.Array, Any]]:
        rows = zip(self.places, self.start, self.sizes, changes, strict=True)
        return [(start + size * change, self.kept[place]) for place, start, size, change in rows]

    def _with(self, arrays: list[jax.Array]) -> PyTree:
        leaves = list(self.kept)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return self.structure.unflatten(leaves)


def _is_coded(leaf: object) -> bool:
    return isinstance(leaf, VQArray | QuantizedWeight)


def _trainable(leaf: Any) -> Any:
    """Return a tree of bools, True where an array is trainable, that is, no code."""
    if isinstance(leaf, VQArray):
        signs = None if leaf.signs is None else False
        return replace(leaf, codes=False, entries=True, scales=True, signs=signs)
    if isinstance(leaf, QuantizedWeight):
        codebook = None if leaf.codebook is None else False
        return replace(leaf, data=False, scales=True, codebook=codebook)
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _rounded(array: jax.Array, kept: Any) -> jax.Array:
    if kept.dtype == jnp.int8:
        return round_to_bound(array, INT8, INT8.largest)
    return array.astype(kept.dtype)


def _as_kept(array: jax.Array, kept: Any) -> jax.Array:
    rounded = _rounded(array, kept)
    if kept.dtype != jnp.int8:
        return rounded  # a conversion between floats passes gradients on
    return array + jax.lax.stop_gradient(rounded.astype(jnp.float32) - array)


# The largest step, as a share of an array's root mean square, or of what quantizing lost.
RATE = 8e-3
# After each of so many rounds codes are chosen anew, and the part that is not trained on is looked
# at; so many looks without a gain end it.
_ROUNDS, _PATIENCE = 20, 10
# After this share of the steps codes stay, so that numbers come to fit them.
_CODES_MOVE = 0.9
# Batches in that part, at most.
_WATCHED = 8
# What is trained: numbers beside codes, and shadows of codes.
_Moved: TypeAlias = tuple[Changes, Moves]


@dataclass(frozen=True, slots=True)
class TuningReport(Shown):
    """The result of a tuning on held-out calibration data (origin: measured).

    Attributes:
        steps: Requested steps.
        best: The step whose arrays were kept; 0 if no step was better.
        before: KL in nats before the tuning, or the relative squared error if outputs are no
            classes.
        after: The same after the tuning.
        recoded: Share of vector codes that changed.
    """

    steps: int
    best: int
    before: float
    after: float
    recoded: float

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain data."""
        return asdict(self)

    def text(self) -> str:
        """Return the result as one line of text."""
        codes = f", {self.recoded:.1%} of codes changed" if self.recoded else ""
        done = f"after {self.best} of {self.steps} steps"
        return f"{self.before:.4f} to {self.after:.4f} {done}{codes}"


def tune_parameters(
    subject: Subject,
    stored: PyTree,
    batches: Sequence[PyTree],
    *,
    steps: int,
    codes: bool = True,
    rate: float = RATE,
    seed: int = 0,
    spread: Spread | None = None,
    progress: Progress = silent,
) -> tuple[PyTree, TuningReport]:
    """Train codebook entries, scales and full-precision arrays towards the full model's outputs.

    Args:
        subject: The full model.
        stored: Its quantized parameters, which are not modified.
        batches: Calibration data; the last quarter, up to 8 batches, is held out.
        steps: Number of training steps, one batch each.
        codes: Whether vector codes change as well, which takes memory for float32 matrices and two
            moments of each.
        rate: Learning rate, relative to the root mean square of each array; for shadows of codes,
            relative to their quantization error.
        seed: Seed of the order of batches. On GPUs results also vary with the order of sums, unless
            `--xla_gpu_deterministic_ops` is set.
        spread: Devices that share each batch; one by default.
        progress: Called with one line per measurement on the held-out data.

    Raises:
        TPUValidationError: There are no steps, or the rate is not positive.
    """
    if steps < 1 or not rate > 0:
        raise TPUValidationError(
            f"steps={steps} and rate={rate} of a tuning; expected at least one step, and a "
            f"rate above 0 such as {RATE}."
        )
    trained_on, watched = held_out(batches, _WATCHED)
    full, home = subject.params, stored
    if spread is not None:
        trained_on, watched = (
            [spread.batch(batch) for batch in some] for some in (trained_on, watched)
        )
        full, stored = spread.params(full), spread.params(stored)
    shadows = Shadows.of(stored, full) if codes else Shadows.none()
    numbers = Continuous.of(stored)
    opened = numbers.with_kept(_opened(stored))

    # All arrays are arguments: what a program closes over is written into it.
    def lost(moved: _Moved, opened: Continuous, full: PyTree, batch: PyTree) -> jax.Array:
        wanted = jax.lax.stop_gradient(subject.apply(full, batch))
        params = dense_parameters(pulled(opened.params(moved[0]), moved[1]))
        return divergence(wanted, subject.apply(params, batch), measure_of(wanted, batch))

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 1 + steps // 20, 1 + steps)
    optimizer = optax.adam(schedule, b2=0.98)

    @partial(jax.jit, donate_argnums=1)
    def some_steps(
        moved: _Moved, moments: PyTree, opened: PyTree, full: PyTree, some: PyTree
    ) -> Any:
        def step(state: PyTree, batch: PyTree) -> tuple[Any, None]:
            moves, moments = optimizer.update(
                jax.grad(lost)(state[0], opened, full, batch), state[1]
            )
            return (optax.apply_updates(state[0], moves), moments), None

        return jax.lax.scan(step, (moved, moments), some)[0]

    look = jax.jit(lost)

    def seen(moved: _Moved) -> float:
        return float(np.mean([look(moved, opened, full, batch) for batch in watched]))

    moved = (numbers.unchanged, shadows.unmoved)
    moments = optimizer.init(moved)
    before = after = seen(moved)
    best, kept, worse, done = 0, stored, 0, 0
    order = _order(len(trained_on), steps, seed)
    size = -(-steps // _ROUNDS)
    for first in range(0, steps, size):
        some = order[first : first + size]
        for together in _stacked([trained_on[place] for place in some]):
            moved, moments = some_steps(moved, moments, opened, full, together)
        done += len(some)
        if shadows.start and done <= _CODES_MOVE * steps:
            numbers = numbers.with_kept(shadows.recoded(numbers.stored(moved[0]), moved[1]))
            opened = numbers.with_kept(_opened(numbers.tree))
        now = seen(moved)
        progress(Counted(f"tuned: {before:.4f} to {now:.4f}", done=done, total=steps))
        if now < after:
            best, kept, after, worse = done, numbers.stored(moved[0]), now, 0
        else:
            worse += 1
        if worse == _PATIENCE or not np.isfinite(now):
            break
    if spread is not None:  # where the parameters came from, not on the mesh
        kept = jax.tree.map(jnp.asarray, jax.device_get(kept))
    return kept, TuningReport(steps, best, before, after, share_recoded(home, kept))


def _opened(stored: PyTree) -> PyTree:
    """Return parameters whose trellis codes are opened, since every step decodes them."""
    return jax.tree.map(
        lambda leaf: leaf.opened() if isinstance(leaf, VQArray) else leaf,
        stored,
        is_leaf=lambda leaf: isinstance(leaf, VQArray),
    )


def _stacked(batches: Sequence[PyTree]) -> list[Any]:
    """Stack batches on a new axis for a loop; batches of different shapes stay apart."""
    shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(batch)) for batch in batches}
    together = [batches] if len(shapes) == 1 else [[batch] for batch in batches]
    return [jax.tree.map(lambda *leaves: jnp.stack(leaves), *some) for some in together]


def _order(batches: int, steps: int, seed: int) -> list[int]:
    """Return the indices of batches, shuffled in every round."""
    drawn = np.random.default_rng(seed)
    rounds = [drawn.permutation(batches) for _ in range(-(-steps // batches))]
    return np.concatenate(rounds)[:steps].tolist()
