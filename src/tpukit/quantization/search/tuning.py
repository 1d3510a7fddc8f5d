"""Tune a quantized model to the full one's outputs: numbers beside codes are trained, codes follow.

Matrices are quantized one by one, each for the error of its own output. What all of them together
do to the model's output is lowered here, on the calibration data, at no byte more: by Adam on the
KL divergence, as AQLM and QuIP# do at their end (arXiv 2401.06118, 2402.04396), and with vector
codes that change (see `shadows`). The last part of the calibration data is not trained on; what is
best there is kept, so a tuning that gains nothing changes nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...models.stored.running import dense_parameters
from ...models.stored.spread import Spread
from ...runtime.progress import Counted, Progress, silent
from ...shown import Shown
from ..measures.evaluation import divergence, measure_of
from ..subject import Subject, held_out
from ..vector_codes.vq_array import VQArray
from .continuous import Changes, Continuous
from .shadows import Moves, Shadows, pulled, share_recoded

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
    """What a tuning did, on the calibration data that it was not trained on (origin: measured).

    Attributes:
        steps: Steps that were asked for.
        best: The step whose arrays were kept; 0 where none was better.
        before: KL in nats before it, or the relative squared error where outputs are no classes.
        after: The same of what was kept.
        recoded: The share of vector codes that are others than before.
    """

    steps: int
    best: int
    before: float
    after: float
    recoded: float

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        codes = f", {self.recoded:.1%} of codes changed" if self.recoded else ""
        done = f"after {self.best} of {self.steps} steps"
        return f"{self.before:.4f} to {self.after:.4f} {done}{codes}"


def tune_parameters(
    subject: Subject,
    stored: PyTree,
    batches: Sequence[Any],
    *,
    steps: int,
    codes: bool = True,
    rate: float = RATE,
    seed: int = 0,
    spread: Spread | None = None,
    progress: Progress = silent,
) -> tuple[PyTree, TuningReport]:
    """Train entries, scales and what was not quantized to give the full model's outputs.

    Args:
        subject: The full model.
        stored: Its parameters with quantized ones among them; they stay as they are.
        batches: Calibration data; the last quarter, 8 batches at most, is not trained on.
        steps: Batches that are trained on, each many times where there are few.
        codes: Whether vector codes change as well. That takes float32 matrices in place of the
            quantized ones, and two moments of each, while it is tuned.
        rate: The largest step, as a share of the root mean square of each array; of matrices
            behind codes, of what quantizing lost.
        seed: Of the order of batches. On GPUs sums of gradients come in no fixed order, unless
            XLA is told so (`--xla_gpu_deterministic_ops`).
        spread: Devices that share each batch; one by default.
        progress: Called with a line at each look at what is held out.

    Raises:
        TPUValidationError: There are no steps, or the rate is not positive.
    """
    if steps < 1 or not rate > 0:
        raise TPUValidationError(
            f"a tuning of {steps} steps at a rate of {rate}; expected at least one step, and a "
            f"rate above 0 such as {RATE}."
        )
    trained_on, watched = held_out(batches, _WATCHED)
    full, home = subject.params, stored
    if spread is not None:
        trained_on, watched = (
            [spread.batch(one) for one in some] for some in (trained_on, watched)
        )
        full, stored = spread.params(full), spread.params(stored)
    shadows = Shadows.of(stored, full) if codes else Shadows.none()
    numbers = Continuous.of(stored)
    opened = numbers.with_kept(_opened(stored))

    # All arrays are arguments: what a program closes over is written into it.
    def lost(moved: _Moved, opened: Continuous, full: PyTree, batch: Any) -> jax.Array:
        wanted = jax.lax.stop_gradient(subject.apply(full, batch))
        params = dense_parameters(pulled(opened.params(moved[0]), moved[1]))
        return divergence(wanted, subject.apply(params, batch), measure_of(wanted, batch))

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 1 + steps // 20, 1 + steps)
    optimizer = optax.adam(schedule, b2=0.98)

    @partial(jax.jit, donate_argnums=1)
    def some_steps(moved: _Moved, moments: Any, opened: Any, full: Any, some: Any) -> Any:
        def step(state: Any, batch: Any) -> tuple[Any, None]:
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
    """The same with codes that are decoded at once: they are, in every step."""
    return jax.tree.map(
        lambda leaf: leaf.opened() if isinstance(leaf, VQArray) else leaf,
        stored,
        is_leaf=lambda leaf: isinstance(leaf, VQArray),
    )


def _stacked(batches: Sequence[Any]) -> list[Any]:
    """Batches on one axis for a loop; of other shapes than one another, each on its own."""
    shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(batch)) for batch in batches}
    together = [batches] if len(shapes) == 1 else [[batch] for batch in batches]
    return [jax.tree.map(lambda *leaves: jnp.stack(leaves), *some) for some in together]


def _order(batches: int, steps: int, seed: int) -> list[int]:
    """Batches in an order of their own in every round."""
    drawn = np.random.default_rng(seed)
    rounds = [drawn.permutation(batches) for _ in range(-(-steps // batches))]
    return np.concatenate(rounds)[:steps].tolist()
