"""The loss on held-out data, over the same batches every time."""

import math
import time
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..annotations import AnyMesh, PyTree
from ..errors import TPUValidationError
from ..frameworks import model_name
from ..models.adapters import Variables
from ..models.loss import Batch, WeightedLoss
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
        step: Steps trained before the evaluation.
        loss: Weighted mean, without z-loss and router penalty.
        weight: Sum of the weights; for a language model, the number of tokens.
    """

    step: int
    loss: float
    weight: float
    batches: int
    seconds: float
    origin = "measured"
    _facts = ("step", "loss", "weight", "batches", "seconds", "perplexity", "origin")

    @property
    def perplexity(self) -> float | None:
        """exp(loss), or None if that overflows."""
        return math.exp(self.loss) if self.loss < 700 else None

    def __str__(self) -> str:
        perplexity = "" if self.perplexity is None else f", perplexity {self.perplexity:.2f}"
        return (
            f"loss {self.loss:.4f}{perplexity} at step {self.step} "
            f"({self.batches} batches, {self.seconds:.1f} s, measured)"
        )


def jit_eval_step(work: Workload, mesh: AnyMesh) -> jax.stages.Wrapped:
    """Return a jitted (params, model_state, batch) -> `WeightedLoss` for `mesh`.

    z-loss and router penalty are left out, because they are for training. The layers of pipeline
    stages run one after the other, each gathered before its turn.
    """
    shardings, layout = work.shardings(mesh), work.layout(mesh)
    execution = work.execution_on(mesh).replace(z_loss=0.0)

    def loss(params: PyTree, model_state: PyTree, batch: Batch) -> WeightedLoss:
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
    """Evaluates a state on the first batches of its data, from the start every time."""

    def __init__(
        self,
        work: Workload,
        mesh: AnyMesh,
        data: TokenData,
        *,
        batches: int,
        share: tuple[int, int],
    ) -> None:
        self._data, self._batches, self._share = data, batches, share
        self._places = work.shardings(mesh).batch
        self._step = jit_eval_step(work, mesh)
        self._work, self._mesh = work, mesh
        self._compiled: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Compile the evaluation, unless that is done or debugging is on."""
        if self._compiled is None and not is_debugging():
            state, batch = self._work.abstract_args(self._mesh)
            lowered = self._step.lower(state.params, state.model_state, batch)
            self._compiled = lowered.compile(compiler_options=compiler_options())

    def run(self, state: TrainState, *, step: int) -> Evaluation:
        """Return the loss of `state`.

        Raises:
            TPUValidationError: The data are less than one batch.
        """
        self.compile()
        program = self._compiled or self._step
        began = time.perf_counter()
        source = BatchSource(self._data.stream(), self._places, self._share)
        sums: list[WeightedLoss] = []
        try:
            for _ in range(self._batches):
                batch = source.place(source.draw())
                with only_nans_inside():
                    sums.append(program(state.params, state.model_state, batch))
        except StopIteration:
            if not sums:
                raise TPUValidationError(
                    "the evaluation data are less than one batch; give more, or a smaller batch."
                ) from None
        finally:
            source.close()
        losses = jax.device_get(sums)
        weight = float(sum(float(loss.weight) for loss in losses))
        total = float(sum(float(loss.total) for loss in losses))
        return Evaluation(
            step=step,
            loss=total / weight if weight else math.nan,
            weight=weight,
            batches=len(losses),
            seconds=time.perf_counter() - began,
        )
