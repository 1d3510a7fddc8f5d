"""The training loop, which dispatches one step ahead so that the device never waits.

A step's metrics are read when the next step is already dispatched. So a decision from them (a
rollback, a stop) comes one step late, and costs nothing when the loss is good. Checkpoints and
evaluations wait for the steps before them.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from ..errors import TPUStorageError, TrainingDiverged
from ..records.metrics import MetricsFile
from ..records.names import (
    EXAMPLES_RATE,
    INPUT_STALL,
    LEARNING_RATE,
    MFU,
    STEP,
    STEP_TIME,
    TIME,
    TOKENS_RATE,
)
from ..records.reporting import report_step
from ..runtime.long_work import report_long_work
from ..step.parts import TrainState
from .batches import BatchSource
from .debugging import explained
from .evaluation import Evaluation, Evaluator
from .failure import Decision, HangWatchdog, LossGuard, PreemptionGuard
from .recompile import StepProgram
from .result import Stopped
from .saving import SaveTimes, StateSaver

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger(__name__)
LONG_WORK_S = 1800.0  # for an evaluation or a save, if steps have a time limit


@dataclass(frozen=True)
class _Dispatched:
    """A step that was dispatched to the device and not read yet."""

    step: int
    metrics: dict[str, Any]
    input_s: float
    stalled_s: float
    checkpoint_s: float
    dispatch_s: float

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step."""
        return self.metrics["loss"].is_ready()


@dataclass(kw_only=True)
class TrainingLoop:
    """Takes the steps of an open run from `step` on; parts that are None are left out."""

    session: "Session"
    program: StepProgram
    source: BatchSource
    notice: PreemptionGuard
    saver: StateSaver | None
    save_times: SaveTimes
    metrics: MetricsFile | None
    evaluator: Evaluator | None
    guard: LossGuard | None
    watchdog: HangWatchdog | None
    state: TrainState
    step: int
    losses: dict[int, float] = field(default_factory=dict[int, float])
    step_times_s: dict[int, float] = field(default_factory=dict[int, float])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self._pending: deque[_Dispatched] = deque()
        self._evaluated_at = -1
        self._checkpoint_s = 0.0  # spent on a save since the last step

    def run(self) -> Stopped:
        """Train until all steps are taken, the data end, or a signal comes.

        Raises:
            TrainingDiverged: The loss went bad and the policy is to stop.
        """
        total = self.session.prepared.total_steps
        self.session.ledger.mark()
        while True:
            while self.step < total:
                if self.notice.should_stop(self.step):
                    return self._finish("preempted")
                if not self._dispatch():
                    return self._finish("data ended")
                self._settle(leave=self.program.ahead)
                self._between_steps()
            self._settle(leave=0)
            if self.step >= total:  # the last steps were not rolled back
                return self._finish("done")

    def _dispatch(self) -> bool:
        """Dispatch the next step; return False when the data have ended."""
        began = time.perf_counter()
        try:
            rows = self.source.draw()
        except StopIteration:
            return False
        drawn = time.perf_counter()
        waited = drawn - began
        # The device stalls only if it has finished every dispatched step.
        idle = not self._pending or self._pending[-1].is_done
        batch = self.source.place(rows)
        changes = len(self.program.changes)
        self.program.check(batch)
        for change in self.program.changes[changes:]:
            self.session.recorder.happened("recompiled", change=str(change))
        with explained(f"step {self.step + 1}"):
            self.state, metrics = self.program(self.state, batch)
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
        """Read the metrics of dispatched steps, all but the last `leave`."""
        while len(self._pending) > leave:
            done = self._pending.popleft()
            with explained(f"step {done.step}"):
                values = {
                    name: float(value) for name, value in jax.device_get(done.metrics).items()
                }
            step_s = self.session.ledger.completed(done.step, stalled_s=done.stalled_s)
            self.session.recorder.stepped(
                done.step,
                step_time_s=step_s,
                input_s=done.input_s,
                input_stall_s=done.stalled_s,
                checkpoint_s=done.checkpoint_s,
                dispatch_s=done.dispatch_s,
            )
            if self.watchdog is not None:
                self.watchdog.beat()
            self.session.directory.check_owned()
            if jax.process_index() == 0:
                report_step(done.step, values["loss"])
            self.losses[done.step], self.step_times_s[done.step] = values["loss"], step_s
            self._record(done.step, values, step_s, done.stalled_s)
            self._judge(done.step, values)

    def _record(
        self, step: int, values: Mapping[str, float], step_s: float, stalled_s: float
    ) -> None:
        prepared = self.session.prepared
        if step % self.session.settings.log_every and step != prepared.total_steps:
            return
        rate = prepared.learning_rate
        record: dict[str, Any] = {
            STEP: step,
            **values,
            LEARNING_RATE: None if rate is None else float(rate(step - 1)),
            STEP_TIME: step_s,
            INPUT_STALL: stalled_s,
            TOKENS_RATE: prepared.throughput.tokens_per_s_per_chip(step_s),
            MFU: prepared.throughput.mfu(step_s),
            TIME: time.time(),
        }
        examples = prepared.throughput.examples_per_s_per_chip(step_s)
        if examples is not None:
            record[EXAMPLES_RATE] = examples
        self._write(record)
        self.session.progress.update(record, goodput=self.session.ledger.goodput().share)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
        for hook in self.session.hooks:
            try:
                hook.on_record(record)
            except OSError as error:  # a full disk must not end the run
                logger.warning("%s could not write: %s", type(hook).__name__, error)

    def _judge(self, step: int, values: Mapping[str, float]) -> None:
        if self.guard is None:
            return
        decision = self.guard.observe(step, values["loss"], values.get("grad_norm"))
        if not decision.is_bad:
            return
        self._report(f"step {step}: {decision.action}, because {decision.reason}")
        if decision.action == "stop":
            raise TrainingDiverged(self._how_to_continue(decision))
        if decision.action == "rollback":
            self._roll_back(decision)

    def _roll_back(self, decision: Decision) -> None:
        """Restore the newest checkpoint; the data stream goes on, past the bad batches."""
        if self.saver is not None:
            self.saver.settle()
        with self.session.ledger.doing("restore"):
            restored = None if self.saver is None else self.saver.restore()
        if restored is None:
            raise TrainingDiverged(
                f"step {decision.step}: {decision.reason}, and there is no checkpoint to go back "
                "to; set checkpoint_every below that step."
            )
        self.rollbacks += 1
        self._pending.clear()
        self.state, self.step = restored.state, restored.step
        self.session.ledger.roll_back(self.step)
        self.session.recorder.rolled_back(self.step)
        for values in (self.losses, self.step_times_s):
            for step in [step for step in values if step > self.step]:
                del values[step]
        if self.metrics is not None:
            self.metrics.roll_back(self.step)
        self._report(f"went back to step {self.step}; the data go on where they are")

    def _how_to_continue(self, decision: Decision) -> str:
        saver = self.saver
        if saver is not None:
            with contextlib.suppress(TPUStorageError):
                saver.wait()
        saved = None if saver is None else saver.saved_step
        good = "no checkpoint was saved" if saved is None else f"step {saved} is saved"
        return (
            f"step {decision.step}: {decision.reason}; {good}. Lower the learning rate, or set "
            "on_bad_loss to 'rollback' or 'skip'."
        )

    def _between_steps(self) -> None:
        evals = self.session.settings.eval_every
        save = self.save_times.is_due(self.step, self.step_times_s)
        evaluate = bool(evals) and self.step % evals == 0
        if not save and not evaluate:
            return
        step = self.step
        self._settle(leave=0)
        if self.step != step:
            return  # rolled back: the due save or evaluation is of a dropped step
        if evaluate:
            self._evaluate()
        if save:
            self._save()

    def _evaluate(self) -> None:
        if self.evaluator is None or self._evaluated_at == self.step:
            return
        self._evaluated_at = self.step
        with self.session.ledger.doing("evaluate"), self._long_work("evaluation"):
            evaluation = self.evaluator.run(self.state, step=self.step)
        self.evaluations.append(evaluation)
        self._write({"step": self.step, "eval_loss": evaluation.loss, "time": time.time()})
        self._report(f"evaluation: {evaluation}")

    def _save(self) -> None:
        # The state before the first step follows from the seed alone.
        if self.saver is None or self.step in (0, self.saver.saved_step):
            return
        began = time.perf_counter()
        with self.session.ledger.doing("checkpoint"), self._long_work("save"):
            self.saver.save(self.step, self.state, **self._positions())
        self._checkpoint_s = time.perf_counter() - began

    @contextlib.contextmanager
    def _long_work(self, name: str) -> Generator[None]:
        """Tell the supervisor and the watchdog about work that is no step."""
        reports = jax.process_index() == 0
        if reports:
            report_long_work(name)
        limit_s = self.session.settings.hang_timeout_s or 0.0
        with contextlib.ExitStack() as stack:
            if self.watchdog is not None:
                stack.enter_context(self.watchdog.allow(max(LONG_WORK_S, limit_s)))
            yield
        if reports:
            report_long_work("")

    def _positions(self) -> dict[str, Any]:
        """Return the positions of data stream and loss guard, for a checkpoint."""
        guard = {} if self.guard is None else self.guard.state()
        return {"data": self.source.state(), "guard": guard}

    def _finish(self, reason: Stopped) -> Stopped:
        self._settle(leave=0)
        if reason != "preempted" and self.losses:
            self._evaluate()
        if self.saver is not None and self.step:
            with self.session.ledger.doing("checkpoint"), self._long_work("save"):
                self.saver.finish(
                    self.step,
                    self.state,
                    **self._positions(),
                    is_preempted=reason == "preempted",
                    on_wait=lambda: self.watchdog and self.watchdog.beat(),
                )
        return reason

    def _report(self, text: str) -> None:
        self.session.notify(text)
        self.session.recorder.happened("note", text=text)
