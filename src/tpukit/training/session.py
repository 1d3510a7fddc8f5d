"""A run while it is open: its folder, log, events, hooks and progress.

`Session.train` restores or initialises the state, compiles the step, and runs the loop.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import jax

from ..hardware import Figure
from ..hardware.target import current_target, on_one_gpu
from ..job.compiler_flags import compiler_options
from ..job.train import TrainingSettings
from ..records.attempts import AttemptRecorder
from ..records.hooks import TrainingHook
from ..records.ledger import Ledger
from ..records.metrics import MetricsFile
from ..records.progress import ProgressView
from ..records.reporting import report_stop
from ..step.parts import TrainState
from .batches import BatchSource
from .checkpoint import TPUCheckpointer
from .data.tokenizer import keep_generation_config, keep_tokenizer
from .debugging import compile_log, explained, is_debugging
from .evaluation import Evaluator
from .export import record_model
from .failure import HangWatchdog, LossGuard, PreemptionGuard
from .loop import TrainingLoop
from .matmul_tuning import tuned_options
from .preparation import PreparedRun
from .recompile import StepProgram, enable_compilation_cache
from .result import TrainingResult
from .run_directory import RunDirectory, name_for, write_placement
from .saving import SaveTimes, StateSaver
from .trained_model import first_params


class Session:
    """One call of `TPUTrainer.train()`; leaving the `with` block closes what the run opened.

    Args:
        prepared: The run.
        slice_name: The slice it runs on; None if that is not the job's own.
        predicted: The step time that `tpukit check` predicted.
        ledger: Accounts for the run's time.
        progress: Shows progress to the user.
        hooks: Observers of the run.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        *,
        slice_name: str | None,
        predicted: Figure,
        ledger: Ledger,
        progress: ProgressView,
        hooks: Sequence[TrainingHook],
    ) -> None:
        self.prepared, self.settings = prepared, prepared.settings
        self.ledger, self.progress, self.hooks = ledger, progress, hooks
        self._slice_name, self._predicted = slice_name, predicted
        self._stack = contextlib.ExitStack()
        model = str(prepared.work.to_dict()["model"])
        self.directory = RunDirectory(self.settings.run_dir or name_for(model))
        self.recorder = AttemptRecorder(
            self.directory.path, process=jax.process_index(), ledger=ledger
        )
        self._result: TrainingResult | None = None
        self.state: TrainState | None = None

    def __enter__(self) -> "Session":
        prepared, folder = self.prepared, self.directory.path
        self.directory.open(
            prepared.identity,
            recipe=prepared.recipe,
            settings={**self.settings.to_dict(), "tokenizer": prepared.tokenizer},
        )
        if jax.process_index() == 0:
            keep_tokenizer(prepared.tokenizer, folder)
            keep_generation_config(self.settings.init_from, folder)
            record_model(prepared.work, prepared.source, folder)
        self._stack.callback(self.directory.close)
        self._stack.callback(self._end_hooks)
        self._stack.callback(self.progress.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.directory.log(f"ended by {type(error).__name__}: {error}")
            self.recorder.end("failed", error=f"{type(error).__name__}: {error}")
        self.recorder.close()
        if error is not None and jax.process_count() > 1:
            # The other processes cannot be waited for: they have ended, or wait for this one.
            self._stack.pop_all()
            self.directory.close()
        self._stack.close()

    def notify(self, text: str) -> None:
        """Write a message to the log and show it to the user."""
        self.directory.log(text)
        self.progress.note(text)

    def train(self) -> TrainingResult:
        """Restore or initialise the state, compile, and train to the end."""
        prepared, settings, predicted = self.prepared, self.settings, self._predicted
        # From here on, so that a signal during the compile ends the run like any later one.
        notice = self._stack.enter_context(PreemptionGuard())
        enable_compilation_cache()
        if is_debugging() and jax.process_index() == 0:
            self._stack.enter_context(compile_log(self.directory.path / "compiles.log"))
        self.notify(prepared.headline)
        shardings = prepared.work.shardings(prepared.mesh).batch
        source = BatchSource(prepared.data.stream(), shardings, prepared.share)
        self._stack.callback(source.close)
        saver, guard = self._open_checkpoints(), _make_guard(settings)
        state, first = self._restore(saver, source, guard)
        resumed_from = None if state is None else first
        self._record_start(first)
        if first < prepared.total_steps:
            with self.ledger.doing("initialise"):
                source.look()
                if saver is not None:
                    saver.prepare()
        program = self._compile()
        evaluator = self._compile_evaluation()
        if predicted.value is not None:
            self.notify(f"predicted step: {predicted}, {predicted.source}")
        if state is None:
            with self.ledger.doing("initialise"), explained("making the first state"):
                params = first_params(settings.init_from, prepared.work, prepared.mesh)
                key = jax.random.key(settings.seed)
                state = prepared.work.init_on(prepared.mesh, key, params)
        if prepared.job.observe.log_device_placement and jax.process_index() == 0:
            placement = write_placement(state, self.directory.path)
            self.notify(f"placement of each array: {self.directory}/{placement.name}")
        loop = TrainingLoop(
            session=self,
            program=program,
            source=source,
            notice=notice,
            saver=saver,
            save_times=SaveTimes(
                settings.checkpoint_every, settings.checkpoint_seconds, first=first
            ),
            metrics=self._open_metrics(first),
            evaluator=evaluator,
            guard=guard,
            watchdog=self._start_watchdog(),
            state=state,
            step=first,
        )
        for hook in self.hooks:
            hook.on_start(self.directory.path, {**prepared.identity, **prepared.recipe})
        self.progress.start(done=first, total=prepared.total_steps)
        stopped = loop.run()
        self.directory.log(f"{stopped} at step {loop.step}")
        if stopped == "preempted":
            self.recorder.happened("preempted", signal=notice.signal_name)
            self.progress.note(self._how_to_continue(loop.step, saver))
            if jax.process_index() == 0:
                report_stop(loop.step, stopped)
        self.recorder.end(stopped)
        self.state = loop.state
        self._result = TrainingResult(
            steps=loop.step,
            first_step=first + 1,
            losses=tuple(loop.losses.values()),
            step_times_s=tuple(loop.step_times_s.values()),
            stopped=stopped,
            run_dir=str(self.directory),
            checkpoint_path=None if saver is None else saver.newest_path,
            resumed_from=resumed_from,
            compile_s=program.compile_s,
            compiled_from_cache=program.from_cache,
            input_wait_s=source.waited_s,
            goodput=self.ledger.goodput(),
            throughput=prepared.throughput,
            predicted_step_s=predicted,
            evaluations=tuple(loop.evaluations),
            recompiles=tuple(program.changes),
            rollbacks=loop.rollbacks,
            failed_saves={} if saver is None else dict(saver.failed),
        )
        return self._result

    def _record_start(self, first: int) -> None:
        about, predicted = self.prepared.throughput, self._predicted
        self.recorder.start(
            step=first,
            total_steps=self.prepared.total_steps,
            device_kind=about.device_kind,
            devices=about.devices,
            chips=about.chips,
            processes=jax.process_count(),
            slice=self._slice_name,
            mfu_convention=about.mfu_convention,
            no_mfu=about.no_mfu,
            flops_per_step=about.flops_per_step.value,
            tokens_per_step=about.tokens_per_step,
            predicted_step_s=predicted.value,
            no_prediction=predicted.reason,
        )

    def _how_to_continue(self, step: int, saver: StateSaver | None) -> str:
        total = self.prepared.total_steps
        if saver is None or saver.saved_step is None:
            return f"stopped after step {step} of {total}; no checkpoint was saved"
        return (
            f"stopped after step {step} of {total}, and saved it; run the same again with "
            f"run_dir {self.directory} to go on"
        )

    def _restore(
        self, saver: StateSaver | None, source: BatchSource, guard: LossGuard | None
    ) -> tuple[TrainState | None, int]:
        """Return the saved state and its step, or (None, 0); data and guard go back to it too."""
        with self.ledger.doing("restore"):
            restored = None if saver is None else saver.restore()
            if restored is None:
                return None, 0
            if restored.data is not None:
                source.restore(restored.data)
        if guard is not None and restored.guard:
            guard.restore(restored.guard)
        self.notify(f"resumed from step {restored.step} of {self.directory}")
        for change in self.directory.changes:
            self.notify(f"from here on: {change}")
        return restored.state, restored.step

    def _compile(self) -> StepProgram:
        program = StepProgram(
            self.prepared.work,
            self.prepared.mesh,
            on_change=self.settings.on_recompile,
            options=self._planned_options(),
            tune=self._matmul_tuning(),
        )
        with self.ledger.doing("compile"), explained("compiling the step"):
            program.compile()
        cached = ", found in the cache" if program.from_cache else ""
        self.notify(
            f"compiled the step in {program.compile_s:.1f} s{cached}"
            if program.ahead
            else "debugging mode: no jit, every operation is checked, compiles are in compiles.log"
        )
        return program

    def _planned_options(self) -> dict[str, Any]:
        """Return the job's compiler options; they are those of a TPU."""
        if jax.default_backend() != "tpu":
            return {}
        job = self.prepared.job
        return {**compiler_options(job.compile, generation=current_target()), **job.options}

    def _matmul_tuning(self) -> Callable[[str], Mapping[str, Any]] | None:
        if not self.settings.tune_products:
            return None
        if not on_one_gpu():
            self.notify("tune_products has no effect here: it is for one NVIDIA GPU")
            return None
        return partial(tuned_options, progress=self.notify)

    def _open_checkpoints(self) -> StateSaver | None:
        settings = self.settings
        if not settings.checkpoint_every:
            return None
        checkpointer = TPUCheckpointer(
            settings.checkpoint_dir or self.directory.checkpoints,
            max_to_keep=settings.keep_checkpoints,
            async_checkpointing=settings.async_checkpointing,
        )
        checkpointer.reserve()
        saver = StateSaver(
            self.prepared.work,
            self.prepared.mesh,
            checkpointer,
            patience_s=settings.save_patience_s,
            progress=self.notify,
            recorder=self.recorder,
        )
        self._stack.callback(saver.close)
        return saver

    def _compile_evaluation(self) -> Evaluator | None:
        prepared = self.prepared
        if prepared.eval_data is None:
            return None
        evaluator = Evaluator(
            prepared.work,
            prepared.mesh,
            prepared.eval_data,
            batches=self.settings.eval_batches,
            share=prepared.share,
        )
        with self.ledger.doing("compile"), explained("compiling the evaluation"):
            evaluator.compile()
        return evaluator

    def _open_metrics(self, first: int) -> MetricsFile | None:
        if jax.process_index() != 0:
            return None
        file = self.directory.metrics
        if not first and file.is_file() and file.stat().st_size:
            self.notify(
                f"{self.directory} has metrics but no checkpoint: beginning at step 1 again"
            )
        metrics = MetricsFile(file, after_step=first)
        self._stack.callback(metrics.close)
        return metrics

    def _start_watchdog(self) -> HangWatchdog | None:
        timeout_s = self.settings.hang_timeout_s
        if timeout_s is None:
            return None
        return self._stack.enter_context(
            HangWatchdog(timeout_s, directory=self.directory.path, before_exit=self.directory.flush)
        )

    def _end_hooks(self) -> None:
        for hook in self.hooks:
            hook.on_end(self._result)


def _make_guard(settings: TrainingSettings) -> LossGuard | None:
    policy = settings.on_bad_loss
    if policy == "ignore":
        return None
    # "skip" looks only for NaN and infinity: a step with gradients that are not finite changed
    # nothing, whereas the update of a spike is applied already and needs a rollback or a stop.
    return LossGuard(policy, spike_factor=None if policy == "skip" else settings.spike_factor)
