"""One call of `train()`: open the run, restore or begin, compile, loop, close."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import jax

from ..errors import TPUStorageError
from ..hardware import Figure
from ..hardware.target import on_one_gpu
from ..job.train import TrainingSettings
from ..records.attempt_recorder import AttemptRecorder
from ..records.hooks import TrainingHook
from ..records.ledger import Ledger
from ..records.metrics import MetricsFile
from ..records.progress import ProgressView
from ..records.reporting import report_stop
from ..step.parts import TrainState
from .batches import BatchSource
from .checkpoint import TPUCheckpointer
from .data.tokenizer_files import keep_generation_config, keep_tokenizer
from .debugging import compile_log, explained, is_debugging
from .evaluation import Evaluator
from .failure import HangWatchdog, LossGuard, PreemptionGuard
from .first_params import first_params
from .loop import LoopParts, LoopSettings, TrainingLoop
from .model_record import record_model
from .preparation import PreparedRun
from .products import tuned_options
from .recompile import StepProgram, enable_compilation_cache
from .result import TrainingResult
from .run_directory import RunDirectory, name_for, write_placement
from .save_times import SaveTimes
from .saver import Saver
from .state_keeper import StateKeeper


class Session:
    """What is open while a run trains; leaving the `with` block closes all of it."""

    def __init__(
        self,
        prepared: PreparedRun,
        settings: TrainingSettings,
        *,
        total_steps: int,
        ledger: Ledger,
        progress: ProgressView,
        hooks: Sequence[TrainingHook],
        compiler_options: Mapping[str, Any] | None = None,
        log_placement: bool = False,
        on: str | None = None,
    ) -> None:
        self._prepared, self._settings, self._total = prepared, settings, total_steps
        self._ledger, self._progress, self._hooks = ledger, progress, hooks
        self._compiler_options, self._log_placement = compiler_options, log_placement
        self._on = on
        self._stack = contextlib.ExitStack()
        model = str(prepared.work.to_dict()["model"])
        self._run = RunDirectory(settings.run_dir or name_for(model))
        self._identity, self._recipe = prepared.identity(settings), prepared.recipe(settings)
        self._recorder = AttemptRecorder(self._run.path, process=jax.process_index(), ledger=ledger)
        self._result: TrainingResult | None = None
        self.state: TrainState | None = None

    def __enter__(self) -> "Session":
        words = self._prepared.tokenizer
        said = {**self._settings.to_dict(), "tokenizer": words}
        self._run.open(self._identity, recipe=self._recipe, settings=said)
        if jax.process_index() == 0:
            keep_tokenizer(words, self._run.path)
            keep_generation_config(self._settings.init_from, self._run.path)
            record_model(self._prepared.work, self._prepared.source, self._run.path)
        self._stack.callback(self._run.close)
        self._stack.callback(self._end_hooks)
        self._stack.callback(self._progress.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._run.log(f"ended by {type(error).__name__}: {error}")
            self._recorder.end("failed", error=f"{type(error).__name__}: {error}")
        self._recorder.close()
        if error is not None and jax.process_count() > 1:
            # The others cannot be waited for: they are gone, or wait for this process to go.
            self._stack.pop_all()
            self._run.close()
        self._stack.close()

    def say(self, text: str) -> None:
        """Tell the log and the person."""
        self._run.log(text)
        self._progress.note(text)

    def run(self, *, predicted: Figure) -> TrainingResult:
        """Restore or begin, compile, and train to the end."""
        prepared, settings = self._prepared, self._settings
        # From here on: a notice that comes while the step compiles ends the run as any other does.
        notice = self._stack.enter_context(PreemptionGuard())
        enable_compilation_cache()
        if is_debugging() and jax.process_index() == 0:
            self._stack.enter_context(compile_log(self._run.path / "compiles.log"))
        self.say(prepared.headline(self._total))
        shardings = prepared.work.shardings(prepared.mesh).batch
        source = BatchSource(prepared.data.stream(), shardings, prepared.share)
        self._stack.callback(source.close)
        keeper, guard = self._keeper(), _guard(settings)
        saver = None if keeper is None else self._saver(keeper)
        state, first = self._restore(keeper, source, guard)
        resumed_from = None if state is None else first
        self._record_start(first, predicted)
        if first < self._total:
            with self._ledger.doing("initialise"):
                source.look()
                if keeper is not None:
                    keeper.prepare()
        program = self._compile()
        evaluator = self._evaluator()
        if predicted.value is not None:
            self.say(f"predicted step: {predicted}, {predicted.source}")
        if state is None:
            with self._ledger.doing("initialise"), explained("making the first state"):
                params = first_params(settings.init_from, prepared.work, prepared.mesh)
                key = jax.random.key(settings.seed)
                state = prepared.work.init_on(prepared.mesh, key, params)
        if self._log_placement and jax.process_index() == 0:
            self.say(f"where each array lies: {write_placement(state, self._run.path)}")
        loop = TrainingLoop(
            parts=LoopParts(
                program=program,
                source=source,
                run=self._run,
                ledger=self._ledger,
                recorder=self._recorder,
                throughput=prepared.throughput,
                progress=self._progress,
                notice=notice,
                keeper=keeper,
                saver=saver,
                metrics=self._metrics(first),
                evaluator=evaluator,
                guard=guard,
                watchdog=self._watchdog(),
                learning_rate=prepared.learning_rate,
                hooks=self._hooks,
            ),
            settings=LoopSettings(
                total_steps=self._total,
                save_times=SaveTimes(
                    settings.checkpoint_every, settings.checkpoint_seconds, first=first
                ),
                eval_every=settings.eval_every,
                log_every=settings.log_every,
            ),
            state=state,
            step=first,
        )
        for hook in self._hooks:
            hook.on_start(self._run.path, {**self._identity, **self._recipe})
        self._progress.start(done=first, total=self._total)
        stopped = loop.run()
        self._run.log(f"{stopped} at step {loop.step}")
        if stopped == "preempted":
            self._recorder.happened("preempted", signal=notice.signal_name)
            self._progress.note(self._how_to_go_on(loop.step, keeper))
            if jax.process_index() == 0:
                report_stop(loop.step, stopped)
        self._recorder.end(stopped)
        self.state = loop.state
        self._result = TrainingResult(
            steps=loop.step,
            first_step=first + 1,
            losses=tuple(loop.losses.values()),
            step_times_s=tuple(loop.step_times_s.values()),
            stopped=stopped,
            run_dir=str(self._run.path),
            checkpoint_path=None if keeper is None else keeper.newest_path,
            resumed_from=resumed_from,
            compile_s=program.compile_s,
            compiled_from_cache=program.from_cache,
            input_wait_s=source.waited_s,
            goodput=self._ledger.goodput(),
            throughput=prepared.throughput,
            predicted_step_s=predicted,
            evaluations=tuple(loop.evaluations),
            recompiles=tuple(program.changes),
            rollbacks=loop.rollbacks,
            failed_saves={} if saver is None else dict(saver.failed),
        )
        return self._result

    def _record_start(self, first: int, predicted: Figure) -> None:
        about = self._prepared.throughput
        self._recorder.start(
            step=first,
            total_steps=self._total,
            device_kind=about.device_kind,
            devices=about.devices,
            chips=about.chips,
            processes=jax.process_count(),
            slice=self._on,
            mfu_convention=about.mfu_convention,
            no_mfu=about.no_mfu,
            flops_per_step=about.flops_per_step.value,
            tokens_per_step=about.tokens_per_step,
            predicted_step_s=predicted.value,
            no_prediction=predicted.reason,
        )

    def _how_to_go_on(self, step: int, keeper: StateKeeper | None) -> str:
        if keeper is None or keeper.saved_step is None:
            return f"stopped after step {step} of {self._total}; no checkpoint was saved"
        return (
            f"stopped after step {step} of {self._total}, and saved it; run the same again with "
            f"run_dir {self._run.path} to go on"
        )

    def _restore(
        self, keeper: StateKeeper | None, source: BatchSource, guard: LossGuard | None
    ) -> tuple[TrainState | None, int]:
        """The state to go on from and its step, with data and guard put back; (None, 0) if none."""
        with self._ledger.doing("restore"):
            restored = None if keeper is None else keeper.restore()
            if restored is None:
                return None, 0
            if restored.data is not None:
                source.restore(restored.data)
        if guard is not None and restored.guard:
            guard.restore(restored.guard)
        self.say(f"resumed from step {restored.step} of {self._run.path}")
        for change in self._run.changes:
            self.say(f"from here on: {change}")
        return restored.state, restored.step

    def _compile(self) -> StepProgram:
        program = StepProgram(
            self._prepared.work,
            self._prepared.mesh,
            on_change=self._settings.on_recompile,
            options=self._compiler_options,
            tune=self._tuning(),
        )
        with self._ledger.doing("compile"), explained("compiling the step"):
            program.compile()
        cached = ", found in the cache" if program.from_cache else ""
        self.say(
            f"compiled the step in {program.compile_s:.1f} s{cached}"
            if program.ahead
            else "debugging mode: no jit, every operation is checked, compiles are in compiles.log"
        )
        return program

    def _tuning(self) -> Callable[[str], Mapping[str, Any]] | None:
        if not self._settings.tune_products:
            return None
        if not on_one_gpu():
            self.say("tune_products is for one NVIDIA GPU; here there is nothing to choose from")
            return None
        return partial(tuned_options, progress=self.say)

    def _keeper(self) -> StateKeeper | None:
        settings = self._settings
        if not settings.checkpoint_every:
            return None
        checkpointer = TPUCheckpointer(
            settings.checkpoint_dir or self._run.checkpoints,
            max_to_keep=settings.keep_checkpoints,
            async_checkpointing=settings.async_checkpointing,
        )
        checkpointer.reserve()
        keeper = StateKeeper(self._prepared.work, self._prepared.mesh, checkpointer)
        self._stack.callback(self._close, keeper)
        return keeper

    def _saver(self, keeper: StateKeeper) -> Saver:
        return Saver(
            keeper,
            patience_s=self._settings.save_patience_s,
            progress=self.say,
            recorder=self._recorder,
        )

    def _close(self, keeper: StateKeeper) -> None:
        """Close the checkpoints; that a save is lost must not hide the error that ends the run."""
        try:
            keeper.close()
        except TPUStorageError as error:
            self.say(str(error))

    def _evaluator(self) -> Evaluator | None:
        prepared = self._prepared
        if prepared.eval_data is None:
            return None
        evaluator = Evaluator(
            prepared.work,
            prepared.mesh,
            prepared.eval_data,
            batches=self._settings.eval_batches,
            share=prepared.share,
        )
        with self._ledger.doing("compile"), explained("compiling the evaluation"):
            evaluator.compile()
        return evaluator

    def _metrics(self, first: int) -> MetricsFile | None:
        if jax.process_index() != 0:
            return None
        if not first and self._run.metrics.is_file() and self._run.metrics.stat().st_size:
            self.say(f"{self._run.path} holds metrics but no checkpoint: beginning at step 1 again")
        metrics = MetricsFile(self._run.metrics, after_step=first)
        self._stack.callback(metrics.close)
        return metrics

    def _watchdog(self) -> HangWatchdog | None:
        timeout_s = self._settings.hang_timeout_s
        if timeout_s is None:
            return None
        return self._stack.enter_context(HangWatchdog(timeout_s, directory=self._run.path))

    def _end_hooks(self) -> None:
        for hook in self._hooks:
            hook.on_end(self._result)


def _guard(settings: TrainingSettings) -> LossGuard | None:
    if settings.on_bad_loss == "ignore":
        return None
    # A step that was skipped because its gradients are not finite left no trace; one that only
    # jumped is applied already, so for spikes the policy is rollback or stop.
    spikes: Any = None if settings.on_bad_loss == "skip" else settings.spike_factor
    return LossGuard(settings.on_bad_loss, spike_factor=spikes)
