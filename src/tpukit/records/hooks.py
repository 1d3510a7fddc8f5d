"""Hooks: observers of a run's start, its records and its end."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from ..errors import ConfigError, MissingExtraError, did_you_mean
from ..plain_data import JsonMapping, JsonObject

SKIPPED, TRACED = 2, 3  # records to skip (warm-up) and to trace (traces are large)
FOLDER = "profile"
PROFILE_MARK = "tpukit.profile"
"""Name of the annotation around the profiled block, with a label and the kind of device."""


def profile_marks(label: str, **more: str) -> dict[str, str]:
    """Return the annotations beside the mark, quoted so that jax's separators do not occur."""
    import jax

    kinds = {device.device_kind for device in jax.local_devices()}
    about = {"label": label, "device_kind": ", ".join(sorted(kinds)), **more}
    return {key: quote(value, safe=" ", errors="replace") for key, value in about.items()}


class RunEnd(Protocol):
    """The result of a run."""

    def to_dict(self) -> JsonObject:
        """Return losses, times and their origins as plain data."""
        ...


class TrainingHook(Protocol):
    """Observer of a run; called between steps, so it must not block.

    It is called on process 0 only, unless it has an attribute `on_every_process` that is true.
    """

    def on_start(self, run_dir: Path, identity: JsonMapping) -> None:
        """Called before the first step; `identity` is the run's model, data and recipe."""
        ...

    def on_record(self, record: JsonMapping) -> None:
        """Called after a record was written to metrics.jsonl; `record["step"]` is its step."""
        ...

    def on_end(self, result: "RunEnd | None") -> None:
        """Called at the end of the run, with None after an error."""
        ...


class ProfileHook:
    """Traces three steps of a run into `profile/` of its folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._seen = 0
        self._mark: Any = None  # open while a trace is recorded

    def on_start(self, run_dir: Path, identity: JsonMapping) -> None:
        """Set the trace's folder."""
        self._folder, self._seen = run_dir / FOLDER, 0

    def on_record(self, record: JsonMapping) -> None:
        """Start the trace after the first steps, and stop it a few later."""
        import jax

        self._seen += 1
        if self._seen == SKIPPED and self._folder is not None:
            jax.profiler.start_trace(str(self._folder))
            marks = profile_marks(self._folder.parent.name)
            self._mark = jax.profiler.TraceAnnotation(PROFILE_MARK, **marks)
            self._mark.__enter__()
        elif self._mark is not None and self._seen >= SKIPPED + TRACED:
            self._stop()

    def on_end(self, result: RunEnd | None) -> None:
        """Stop a trace that is still being recorded."""
        self._stop()

    def _stop(self) -> None:
        if self._mark is not None:
            import jax

            self._mark.__exit__(None, None, None)
            self._mark = None
            jax.profiler.stop_trace()


class TensorBoardHook:
    """Writes every number of every record for `tensorboard --logdir RUN_DIR`.

    Args:
        log_dir: Folder of the event file; `tensorboard/` in the run directory by default.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise MissingExtraError(
                "tensorboard", needed_for="the TensorBoard hook", module="tensorboardX"
            ) from None
        self._module: Any = tensorboardX
        self._log_dir = log_dir
        self._writer: Any = None

    def on_start(self, run_dir: Path, identity: JsonMapping) -> None:
        """Open the event file."""
        folder = Path(self._log_dir) if self._log_dir else run_dir / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder))

    def on_record(self, record: JsonMapping) -> None:
        """Add the record's numbers."""
        for name, value in record.items():
            if isinstance(value, float) and name != "time":
                self._writer.add_scalar(name, value, record["step"], walltime=record.get("time"))

    def on_end(self, result: RunEnd | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbHook:
    """Logs every record; `WANDB_MODE=offline` keeps it on this machine.

    Args:
        project: The wandb project; wandb's own setting by default.
    """

    def __init__(self, project: str | None = None) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  an extra
        except ImportError:
            raise MissingExtraError(
                "wandb", needed_for="the Weights & Biases hook", module="wandb"
            ) from None
        self._module: Any = wandb
        self._project = project
        self._run: Any = None

    def on_start(self, run_dir: Path, identity: JsonMapping) -> None:
        """Start a wandb run, or resume the one of this folder."""
        self._run = self._module.init(
            project=self._project,
            name=run_dir.name,
            id=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=dict(identity),
            allow_val_change=True,  # a run may be resumed with another learning rate
        )

    def on_record(self, record: JsonMapping) -> None:
        """Log the record at its step."""
        self._run.log(dict(record), step=record["step"])

    def on_end(self, result: RunEnd | None) -> None:
        """Finish the run, as failed when there is no result."""
        if self._run is not None:
            self._run.finish(exit_code=0 if result is not None else 1)


def make_hooks(chosen: Iterable[str | TrainingHook], *, process: int = 0) -> list[TrainingHook]:
    """Return the hooks to call on a process; hooks given by name are created.

    Raises:
        ConfigError: No hook has this name.
    """
    built_in = {"tensorboard": TensorBoardHook, "wandb": WandbHook, "profile": ProfileHook}
    hooks: list[TrainingHook] = []
    for name in chosen:
        if not isinstance(name, str):
            if process == 0 or getattr(name, "on_every_process", False):
                hooks.append(name)
            continue
        if name not in built_in:
            raise ConfigError(
                f"no hook is called '{name}'; there are {', '.join(built_in)}."
                + did_you_mean(name, built_in)
            )
        if process == 0:
            hooks.append(built_in[name]())
    return hooks
