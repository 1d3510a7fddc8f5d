"""Tune a quantized model to the full one's outputs: codes stay, numbers beside them are trained.

Matrices are quantized one by one, each for the error of its own output. What all of them together
do to the model's output is lowered here, on the calibration data, at no byte more: by Adam on the
KL divergence, as AQLM and QuIP# do at their end (arXiv 2401.06118, 2402.04396). The last part of
the calibration data is not trained on; what is best there is kept, so a tuning that gains nothing
changes nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...models.stored.running import with_stored_parameters
from ...models.stored.spread import Spread
from ...runtime.progress import Counted, Progress, silent
from ..measures.evaluation import divergence, measure_of
from ..subject import Subject, held_out
from ..vector_codes.vq_array import VQArray
from .continuous import Changes, Continuous

# The largest step, as a share of an array's root mean square.
RATE = 5e-3
# How often the part that is not trained on is looked at, and how many looks without a gain end it.
_LOOKS, _PATIENCE = 10, 3
# Batches in that part, at most.
_WATCHED = 8


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What a tuning did, on the calibration data that it was not trained on (origin: measured).

    Attributes:
        steps: Steps that were asked for.
        best: The step whose arrays were kept; 0 where none was better.
        before: KL in nats before it, or the relative squared error where outputs are no classes.
        after: The same of what was kept.
    """

    steps: int
    best: int
    before: float
    after: float

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        return f"{self.before:.4f} to {self.after:.4f} after {self.best} of {self.steps} steps"


def tune_parameters(
    subject: Subject,
    stored: PyTree,
    batches: Sequence[Any],
    *,
    steps: int,
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
        rate: The largest step, as a share of the root mean square of each array.
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
    parts = Continuous.of(_opened(stored))
    quantized = with_stored_parameters(subject.apply, trained=True)

    # All arrays are arguments: what a program closes over is written into it.
    def lost(changes: Changes, parts: Continuous, full: PyTree, batch: Any) -> jax.Array:
        wanted = jax.lax.stop_gradient(subject.apply(full, batch))
        outputs = quantized(parts.params(changes), batch)
        return divergence(wanted, outputs, measure_of(wanted, batch))

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 1 + steps // 20, 1 + steps)
    optimizer = optax.adam(schedule, b2=0.98)

    @partial(jax.jit, donate_argnums=1)
    def step(changes: Any, moments: Any, *given: Any) -> tuple[Any, Any]:
        moves, moments = optimizer.update(jax.grad(lost)(changes, *given), moments)
        return optax.apply_updates(changes, moves), moments

    look = jax.jit(lost)

    def seen(changes: Changes) -> float:
        return float(np.mean([look(changes, parts, full, batch) for batch in watched]))

    changes = parts.unchanged
    moments = optimizer.init(changes)
    before = after = seen(changes)
    best, kept, worse = 0, changes, 0
    order = _order(len(trained_on), steps, seed)
    for number, place in enumerate(order, 1):
        changes, moments = step(changes, moments, parts, full, trained_on[place])
        if number % max(1, steps // _LOOKS) and number < steps:
            continue
        now = seen(changes)
        progress(Counted(f"tuned: {before:.4f} to {now:.4f}", done=number, total=steps))
        if now < after:
            best, kept, after, worse = number, changes, now, 0
        else:
            worse += 1
        if worse == _PATIENCE or not np.isfinite(now):
            break
    # Where the parameters came from, not on the mesh.
    made = Continuous.of(home).stored(kept if spread is None else jax.device_get(kept))
    return made, TuningReport(steps, best, before, after)


def _opened(stored: PyTree) -> PyTree:
    """The same with codes that are decoded at once: they are, in every step."""
    return jax.tree.map(
        lambda leaf: leaf.opened() if isinstance(leaf, VQArray) else leaf,
        stored,
        is_leaf=lambda leaf: isinstance(leaf, VQArray),
    )


def _order(batches: int, steps: int, seed: int) -> list[int]:
    """Batches in an order of their own in every round."""
    drawn = np.random.default_rng(seed)
    rounds = [drawn.permutation(batches) for _ in range(-(-steps // batches))]
    return np.concatenate(rounds)[:steps].tolist()
