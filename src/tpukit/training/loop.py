"""The training loop: dispatch ahead, look back one step, and never make the device wait.

A step's metrics are read when the next one is already on its way, so the device always has
something to do; what is decided from them (a rollback, a stop) comes one step late, and costs
nothing when nothing is wrong. Checkpoints and evaluations wait for the steps before them.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..errors import TPUStorageError, TrainingDiverged
from ..records.attempt_recorder import AttemptRecorder
from ..records.hooks import TrainingHook
from ..records.ledger import Ledger
from ..records.metrics import MetricsFile
from ..records.progress import ProgressView
from ..records.reporting import report_step
from ..records.throughput import Throughput
from ..step.optimizer.spec import LearningRate
from ..step.parts import TrainState
from .batches import BatchSource
from .debugging import explained
from .evaluation import Evaluation, Evaluator
from .failure import Decision, HangWatchdog, LossGuard, PreemptionGuard
from .recompile import StepProgram
from .result import Stopped
from .run_directory import RunDirectory
from .save_times import SaveTimes
from .saver import Saver
from .state_keeper import StateKeeper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """When the loop does what; 0 is never."""

    total_steps: int
    save_times: SaveTimes
    eval_every: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """What a loop works with; those that are None are not asked for."""

    program: StepProgram
    source: BatchSource
    run: RunDirectory
    ledger: Ledger
    recorder: AttemptRecorder
    throughput: Throughput
    progress: ProgressView
    notice: PreemptionGuard
    keeper: StateKeeper | None = None
    saver: Saver | None = None
    metrics: MetricsFile | None = None
    evaluator: Evaluator | None = None
    guard: LossGuard | None = None
    watchdog: HangWatchdog | None = None
    learning_rate: LearningRate | None = None
    hooks: Sequence[TrainingHook] = ()


@dataclass(frozen=True)
class _Dispatched:
    """A step that is on its way."""

    step: int
    metrics: dict[str, Any]
    input_s: float
    stalled_s: float
    checkpoint_s: float
    dispatch_s: float

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it."""
        return self.metrics["loss"].is_ready()


@dataclass
class TrainingLoop:
    """Steps from `step` to the end, with everything that happens between them."""

    parts: LoopParts
    settings: LoopSettings
    state: TrainState
    step: int
    losses: dict[int, float] = field(default_factory=dict[int, float])
    step_times_s: dict[int, float] = field(default_factory=dict[int, float])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self._pending: deque[_Dispatched] = deque()
        self._evaluated_at = -1
        self._checkpoint_s = 0.0  # of the save since the last step, if there was one

    def run(self) -> Stopped:
        """Train until all steps are taken, the data end, or a signal comes.

        Raises:
            TrainingDiverged: The loss went bad and the policy is to stop.
        """
        parts, total = self.parts, self.settings.total_steps
        parts.ledger.mark()
        while True:
            while self.step < total:
                if parts.notice.should_stop(self.step):
                    return self._finish("preempted")
                if not self._dispatch():
                    return self._finish("data ended")
                self._settle(leave=parts.program.ahead)
                self._between_steps()
            self._settle(leave=0)
            if self.step >= total:  # the last steps were not rolled back
                return self._finish("done")

    def _dispatch(self) -> bool:
        """Put the next step on its way; False when there is no more data."""
        parts = self.parts
        began = time.perf_counter()
        try:
            rows = parts.source.draw()
        except StopIteration:
            return False
        drawn = time.perf_counter()
        waited = drawn - began
        # Waiting matters only if the device has finished all it was given.
        idle = not self._pending or self._pending[-1].is_done
        batch = parts.source.place(rows)
        changes = len(parts.program.changes)
        parts.program.check(batch)
        for change in parts.program.changes[changes:]:
            parts.recorder.happened("recompiled", change=str(change))
        with explained(f"step {self.step + 1}"):
            self.state, metrics = parts.program(self.state, batch)
        self.step += 1
        self._pending.append(
            _Dispatched(
                self.step,
                metrics,
                input_s=waited,
                stalled_s=waited if idle else 0.0,
                checkpoint_s=self._checkpoint_s,
                dispatch_s=time.perf_counter() - drawn,
            )
        )
        self._checkpoint_s = 0.0
        return True

    def _settle(self, *, leave: int) -> None:
        """Look at the steps that are done, all but the last `leave`."""
        while len(self._pending) > leave:
            done = self._pending.popleft()
            with explained(f"step {done.step}"):
                values = {
                    name: float(value) for name, value in jax.device_get(done.metrics).items()
                }
            took = self.parts.ledger.completed(done.step, stalled_s=done.stalled_s)
            self.parts.recorder.stepped(
                done.step,
                step_time_s=took,
                input_s=done.input_s,
                input_stall_s=done.stalled_s,
                checkpoint_s=done.checkpoint_s,
                dispatch_s=done.dispatch_s,
            )
            if self.parts.watchdog is not None:
                self.parts.watchdog.beat()
            if jax.process_index() == 0:
                report_step(done.step, values["loss"])
            self.losses[done.step], self.step_times_s[done.step] = values["loss"], took
            self._record(done.step, values, took, done.stalled_s)
            self._judge(done.step, values)

    def _record(
        self, step: int, values: Mapping[str, float], took: float, stalled_s: float
    ) -> None:
        parts = self.parts
        if step % self.settings.log_every and step != self.settings.total_steps:
            return
        rate = parts.learning_rate
        record: dict[str, Any] = {
            "step": step,
            **values,
            "learning_rate": None if rate is None else float(rate(step - 1)),
            "step_time_s": took,
            "input_stall_s": stalled_s,
            "tokens_per_s_per_chip": parts.throughput.tokens_per_s_per_chip(took),
            "mfu": parts.throughput.mfu(took),
            "time": time.time(),
        }
        examples = parts.throughput.examples_per_s_per_chip(took)
        if examples is not None:
            record["examples_per_s_per_chip"] = examples
        self._write(record)
        parts.progress.update(record, goodput=parts.ledger.goodput().share)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.parts.metrics is not None:
            self.parts.metrics.write(record)
        for hook in self.parts.hooks:
            try:
                hook.on_record(record)
            except OSError as error:  # a disk that is full costs what is shown, never the run
                logger.warning("%s could not write: %s", type(hook).__name__, error)

    def _judge(self, step: int, values: Mapping[str, float]) -> None:
        if self.parts.guard is None:
            return
        decision = self.parts.guard.observe(step, values["loss"], values.get("grad_norm"))
        if not decision.is_bad:
            return
        self._say(f"step {step}: {decision.action}, because {decision.reason}")
        if decision.action == "stop":
            raise TrainingDiverged(self._how_to_go_on(decision))
        if decision.action == "rollback":
            self._roll_back(decision)

    def _roll_back(self, decision: Decision) -> None:
        """Restore the newest checkpoint; the data go on, so the bad batches are not seen again."""
        parts = self.parts
        if parts.saver is not None:
            parts.saver.settle()
        with parts.ledger.doing("restore"):
            restored = None if parts.keeper is None else parts.keeper.restore()
        if restored is None:
            raise TrainingDiverged(
                f"step {decision.step}: {decision.reason}, and there is no checkpoint to go back "
                "to; set checkpoint_every below that step."
            )
        self.rollbacks += 1
        self._pending.clear()
        self.state, self.step = restored.state, restored.step
        parts.ledger.roll_back(self.step)
        parts.recorder.rolled_back(self.step)
        for seen in (self.losses, self.step_times_s):
            for step in [step for step in seen if step > self.step]:
                del seen[step]
        if parts.metrics is not None:
            parts.metrics.roll_back(self.step)
        self._say(f"went back to step {self.step}; the data go on where they are")

    def _how_to_go_on(self, decision: Decision) -> str:
        keeper = self.parts.keeper
        if keeper is not None:
            with contextlib.suppress(TPUStorageError):
                keeper.wait()
        saved = None if keeper is None else keeper.saved_step
        good = "no checkpoint was saved" if saved is None else f"step {saved} is saved"
        return (
            f"step {decision.step}: {decision.reason}; {good}. Lower the learning rate, or set "
            "on_bad_loss to 'rollback' or 'skip'."
        )

    def _between_steps(self) -> None:
        evals = self.settings.eval_every
        save = self.settings.save_times.is_due(self.step, self.step_times_s)
        evaluate = bool(evals) and self.step % evals == 0
        if not save and not evaluate:
            return
        step = self.step
        self._settle(leave=0)
        if self.step != step:
            return  # rolled back: what was due belongs to steps that are gone
        if evaluate:
            self._evaluate()
        if save:
            self._save()

    def _evaluate(self) -> None:
        parts = self.parts
        if parts.evaluator is None or self._evaluated_at == self.step:
            return
        self._evaluated_at = self.step
        with parts.ledger.doing("evaluate"):
            found = parts.evaluator.run(self.state, step=self.step)
        self.evaluations.append(found)
        self._write({"step": self.step, "eval_loss": found.loss, "time": time.time()})
        self._say(f"evaluation: {found}")

    def _save(self) -> None:
        parts = self.parts
        # Before the first step there is nothing that the seed would not give again.
        if parts.keeper is None or parts.saver is None or self.step in (0, parts.keeper.saved_step):
            return
        began = time.perf_counter()
        with parts.ledger.doing("checkpoint"):
            parts.saver.save(self.step, self.state, **self._positions())
        self._checkpoint_s = time.perf_counter() - began

    def _positions(self) -> dict[str, Any]:
        """Return where data and guard are, for whoever goes on from here."""
        guard = {} if self.parts.guard is None else self.parts.guard.state()
        return {"data": self.parts.source.state(), "guard": guard}

    def _finish(self, reason: Stopped) -> Stopped:
        self._settle(leave=0)
        parts = self.parts
        if reason != "preempted" and self.losses:
            self._evaluate()
        if parts.saver is not None and self.step:
            with parts.ledger.doing("checkpoint"):
                parts.saver.finish(
                    self.step,
                    self.state,
                    **self._positions(),
                    is_preempted=reason == "preempted",
                    on_wait=lambda: parts.watchdog and parts.watchdog.beat(),
                )
        return reason

    def _say(self, text: str) -> None:
        self.parts.run.log(text)
        self.parts.progress.note(text)
        self.parts.recorder.happened("note", text=text)
