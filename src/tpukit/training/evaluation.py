"""The loss on data that is not trained on: the same batches every time."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..annotations import AnyMesh
from ..errors import TPUValidationError
from ..frameworks import model_name
from ..models.adapters import Variables
from ..models.loss.loss import Batch, WeightedLoss
from ..runtime.user_code import errors_in_trace
from ..shown import Shown
from ..step.parts import TrainState, weighted_loss
from ..step.placement import in_ring_order
from ..step.workload import Workload
from .batches import BatchSource
from .data.opening import TokenData
from .debugging import is_debugging, only_nans_inside
from .recompile import compiler_options


@dataclass(frozen=True, kw_only=True)
class Evaluation(Shown):
    """One pass over the evaluation batches (origin: measured).

    Attributes:
        step: Steps trained before.
        loss: Mean over everything that counts; no z-loss, no router penalty.
        weight: How much counted: tokens, for a language model.
    """

    step: int
    loss: float
    weight: float
    batches: int
    seconds: float

    @property
    def perplexity(self) -> float | None:
        """exp(loss), or None where that is no number."""
        return math.exp(self.loss) if self.loss < 700 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "perplexity": self.perplexity, "origin": "measured"}

    def __str__(self) -> str:
        perplexity = "" if self.perplexity is None else f", perplexity {self.perplexity:.2f}"
        return (
            f"loss {self.loss:.4f}{perplexity} at step {self.step} "
            f"({self.batches} batches, {self.seconds:.1f} s, measured)"
        )


def jit_eval_step(work: Workload, mesh: AnyMesh) -> Any:
    """(params, model_state, batch) -> the sum of losses and its weight, compiled for `mesh`.

    No z-loss and no router penalty: those are for training. Layers that a pipeline spreads over
    stages are used one after the other, each gathered when its turn comes.
    """
    shardings, layout = work.shardings(mesh), work.layout(mesh)
    execution = work.execution_on(mesh).replace(z_loss=0.0)

    def loss(params: Any, model_state: Any, batch: Batch) -> WeightedLoss:
        with layout.activation_rules(), errors_in_trace(model_name(work.model)):
            batch = in_ring_order(batch, execution.zigzag)
            applied = work.adapter.apply(
                Variables(params, model_state),
                batch,
                rng=jax.random.key(work.seed),
                execution=execution,
            )
            return weighted_loss(work.loss, applied.outputs, batch)

    return jax.jit(
        loss,
        in_shardings=(shardings.state.params, shardings.state.model_state, shardings.batch),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


class Evaluator:
    """Evaluates a state on the first batches of some data, from the start every time."""

    def __init__(
        self, work: Workload, mesh: Any, data: TokenData, *, batches: int, share: tuple[int, int]
    ) -> None:
        self._data, self._batches, self._share = data, batches, share
        self._places = work.shardings(mesh).batch
        self._step = jit_eval_step(work, mesh)
        self._work, self._mesh = work, mesh
        self._compiled: Any = None

    def compile(self) -> None:
        """Compile ahead of the first evaluation."""
        if self._compiled is None and not is_debugging():
            state, batch = self._work.abstract_args(self._mesh)
            lowered = self._step.lower(state.params, state.model_state, batch)
            self._compiled = lowered.compile(compiler_options=compiler_options())

    def run(self, state: TrainState, *, step: int) -> Evaluation:
        """The loss of `state`.

        Raises:
            TPUValidationError: The data hold no batch.
        """
        self.compile()
        program = self._compiled or self._step
        began = time.perf_counter()
        source = BatchSource(self._data.stream(), self._places, self._share)
        sums: list[Any] = []
        try:
            for _ in range(self._batches):
                batch = source.place(source.draw())
                with only_nans_inside():
                    sums.append(program(state.params, state.model_state, batch))
        except StopIteration:
            if not sums:
                raise TPUValidationError(
                    "the evaluation data hold less than one batch; give more, or a smaller batch."
                ) from None
        finally:
            source.close()
        found = jax.device_get(sums)
        weight = float(sum(float(one.weight) for one in found))
        total = float(sum(float(one.total) for one in found))
        return Evaluation(
            step=step,
            loss=total / weight if weight else math.nan,
            weight=weight,
            batches=len(found),
            seconds=time.perf_counter() - began,
        )
