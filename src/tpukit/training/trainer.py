"""`TPUTrainer`: trains a model on the CPUs, GPUs or TPUs that are here."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..annotations import Device
from ..errors import ConfigError, TPUModelError, did_you_mean
from ..hardware.mesh_sizes import fit_mesh, write_mesh
from ..job.config import TPUConfig
from ..job.config.spelling import spell_as_job
from ..job.job import Job
from ..job.precision import NARROW
from ..job.train import TrainingSettings
from ..parallel.mesh.axes import MeshShape, name_axes
from ..parallel.mesh.mesh import mesh_here
from ..records.hooks import TrainingHook, make_hooks
from ..records.ledger import Ledger
from ..records.progress import ProgressView, make_progress
from ..runtime.environment import jax_state, open_devices
from ..step.parts import TrainState
from ..step.workload import Workload
from .data.opening import DataSource
from .preparation import PreparedRun, predicted_step, prepare
from .result import TrainingResult
from .run_directory import RunDirectory
from .session import Session
from .throughput import count_chips

DEFAULT_LEVEL = 2  # of compiler flags, with enable_xla_optimizations and no level


class TPUTrainer:
    """Trains a model.

    ```python
    trainer = TPUTrainer(model="llama3.2-1b", mesh_shape=(8, 8), run_dir="runs/one")
    result = trainer.train("gs://bucket/tokens/", num_steps=100_000, batch_size_per_chip=16,
                           sequence_length=4096)
    ```

    A second call with the same `run_dir` resumes from the newest good checkpoint, and gives the
    same numbers as a run without interruption.

    Args:
        config: Chips, precision and memory settings; by default those of the devices here.
        model: A preset's name, a `TransformerConfig`, a flax nnx, flax linen or equinox module, a
            pair (init, apply), or a `Workload`.
        mesh_shape: Devices along each axis: sizes by name, or numbers for fsdp, fsdp x tensor or
            data x fsdp x tensor. All devices on "fsdp" by default.
        use_bf16: Compute in bfloat16 with float32 master parameters, gradients and loss; False
            computes in float32. A `Workload` keeps its own precision.
        enable_xla_optimizations: Set the TPU compiler flags of `config.xla_optimization_level`;
            no effect on other devices.
        optimizer: A name, or an optax transformation; by default that of the settings.
        checkpoint_dir: Folder of the checkpoints, also gs://…; by default `run_dir/checkpoints`.
        run_dir: The run's own folder, also gs://…; a new one under runs/ by default.
        settings: All other settings, as `TrainingSettings` or a mapping of its fields.
        dcn_mesh_shape: For several slices: the factor of each axis that runs across slices.
        strategy: How parameters are sharded; by default it follows from the axis names.
        hooks: More hooks than the settings name: names or objects.
        progress: Whether to show progress on standard error, or a view that shows it.
        devices: The devices to use; all by default.
        **workload: Further arguments of `Workload`: remat, microbatches, loss, batch, inputs, …

    Attributes:
        job: The job that is trained, as `tpukit.check` takes it.
        state: The trained state (step, params, opt_state, model_state), after `train()`.
        workload: The model, loss and optimizer that were trained, after `train()`.
    """

    def __init__(
        self,
        config: TPUConfig | None = None,
        model: object = None,
        mesh_shape: MeshShape | None = None,
        use_bf16: bool = True,
        enable_xla_optimizations: bool = False,
        *,
        optimizer: str | optax.GradientTransformation | None = None,
        checkpoint_dir: str | Path | None = None,
        run_dir: str | Path | None = None,
        settings: TrainingSettings | Mapping[str, Any] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        strategy: str | None = None,
        hooks: Sequence[TrainingHook | str] = (),
        progress: bool | ProgressView = True,
        devices: Sequence[Device] | None = None,
        **workload: Any,
    ) -> None:
        if model is None:
            raise TPUModelError(
                "TPUTrainer needs a model, for example TPUTrainer(model='llama3.2-1b')."
            )
        job = _job_from_arguments(
            config,
            model,
            mesh=name_axes(mesh_shape or (None if config is None else config.mesh_shape)),
            use_bf16=use_bf16,
            enable_xla_optimizations=enable_xla_optimizations,
            optimizer=optimizer,
            settings=settings,
            folders={"checkpoint_dir": checkpoint_dir, "run_dir": run_dir},
            workload={"strategy": strategy, **workload},
        )
        self._open(job, dcn_mesh_shape, hooks, progress, devices)
        self.config = config
        if enable_xla_optimizations:
            self._set_flags()

    @classmethod
    def from_job(
        cls,
        job: Job,
        *,
        hooks: Sequence[TrainingHook | str] = (),
        progress: bool | ProgressView = True,
        devices: Sequence[Device] | None = None,
    ) -> "TPUTrainer":
        """Return the trainer of a job; it trains the step that `check` compiles.

        If the devices here are not the job's slice, its mesh is fitted to them and the run
        reports it.

        Args:
            job: The job, with its `train:` section.
            hooks: See `TPUTrainer`.
            progress: See `TPUTrainer`.
            devices: The devices to use; all by default.
        """
        trainer = cls.__new__(cls)
        trainer.config = None
        trainer._open(job, job.dcn_mesh, hooks, progress, devices)
        return trainer

    def _open(
        self,
        job: Job,
        dcn_mesh: Sequence[int] | None,
        hooks: Sequence[TrainingHook | str],
        progress: bool | ProgressView,
        devices: Sequence[Device] | None,
    ) -> None:
        """Lay the job's mesh over the devices that are here."""
        self.job = job
        self.state: TrainState | None = None
        self.workload: Workload | None = None
        self._hooks, self._progress = tuple(hooks), progress
        self._notes: list[str] = []
        self.devices = list(open_devices() if devices is None else devices)
        here = len(self.devices)
        sizes = dict(job.mesh) if job.on is None else fit_mesh(job.mesh, here)
        planned = None if job.on is None else job.slice.devices
        is_elsewhere = planned not in (None, here)
        if is_elsewhere:
            self._notes.append(
                f"the job is for the {planned} devices of {job.on}, {write_mesh(job.mesh_sizes)}; "
                f"here are {here}: {write_mesh(sizes)}"
            )
            dcn_mesh = None
        self.mesh = mesh_here(sizes, self.devices, dcn_mesh_shape=dcn_mesh)
        is_planned_slice = not is_elsewhere and self.devices[0].platform == "tpu"
        self._slice_name = job.on if is_planned_slice else None

    @property
    def settings(self) -> TrainingSettings:
        """The job's `train:` section."""
        return self.job.train

    def train(
        self,
        train_data: DataSource | None = None,
        num_steps: int | None = None,
        batch_size_per_chip: int | None = None,
        sequence_length: int | None = None,
        *,
        batch_size: int | None = None,
        eval_data: DataSource | None = None,
    ) -> TrainingResult:
        """Train until `num_steps` steps of the run are taken.

        Args:
            train_data: A token file or folder, text, gs://…, an array of tokens, or an iterable
                of batches; see `open_data`.
            num_steps: Steps of the whole run: one that resumes at 600 of 1000 takes 400 more.
            batch_size_per_chip: Examples per chip and step.
            sequence_length: Tokens per example; by default 2048, or the model's longest if shorter.
            batch_size: Examples per step over all chips, instead of per chip.
            eval_data: Data of the evaluation loss, every `eval_every` steps and at the end.

        Raises:
            ConfigError: A setting is missing or wrong.
            TPUValidationError: The data or the run directory do not belong to this run.
            TPUCheckpointError: The checkpoints are of another model, or cannot be written.
            TrainingDiverged: The loss went bad and the policy is to stop.
        """
        total = self._total_steps(num_steps)
        _refuse_uncountable(
            num_steps=total,
            batch_size=batch_size,
            batch_size_per_chip=batch_size_per_chip,
            sequence_length=sequence_length,
        )
        ledger = Ledger()
        arguments = {
            "train.steps": num_steps,
            "batch_size": self._batch_size(batch_size, batch_size_per_chip),
            "sequence_length": sequence_length,
        }
        changes = {key: value for key, value in arguments.items() if value is not None}
        self.job = self.job.replace(changes) if changes else self.job
        with ledger.doing("initialise"):
            prepared = self._prepare(train_data, eval_data)
        is_first = jax.process_index() == 0
        with Session(
            prepared,
            slice_name=self._slice_name,
            predicted=predicted_step(self.job),
            ledger=ledger,
            progress=self._view() if is_first else ProgressView(),
            hooks=self._make_hooks(),
        ) as session:
            for note in (*self._notes, *prepared.notes):
                session.notify(note)
            result = session.train()
        self.state, self.workload = session.state, prepared.work
        return result

    def check(self) -> str:
        """Raise the errors that `train()` would raise before its first step; write nothing.

        Returns:
            One line on what would be trained.
        """
        self._total_steps(None)
        prepared = self._prepare(None, None)
        self._make_hooks()
        if self.settings.run_dir is not None:
            with closing(RunDirectory(self.settings.run_dir)) as directory:
                directory.refuse_other(prepared.identity, recipe=prepared.recipe)
        return prepared.headline

    def _total_steps(self, num_steps: int | None) -> int:
        total = self.settings.steps if num_steps is None else num_steps
        if total is None:
            raise ConfigError("for how many steps? Give num_steps (--steps, or steps in train:).")
        return total

    def _prepare(self, train_data: DataSource | None, eval_data: DataSource | None) -> PreparedRun:
        prepared = prepare(
            self.job,
            mesh=self.mesh,
            train_data=train_data if train_data is not None else self.settings.data,
            eval_data=eval_data if eval_data is not None else self.settings.eval_data,
        )
        notes = [*self._notes, *prepared.notes]
        if notes and self.job.observe.enable_strict_validation:
            raise ConfigError(f"enable_strict_validation is set, and {'; '.join(notes)}.")
        return prepared

    def _make_hooks(self) -> list[TrainingHook]:
        profile = ["profile"] * self.job.observe.enable_profiling
        wanted = (*self._hooks, *self.settings.hooks, *profile)
        return make_hooks(wanted, process=jax.process_index())

    def _view(self) -> ProgressView:
        return make_progress(self._progress) if isinstance(self._progress, bool) else self._progress

    def _batch_size(self, batch_size: int | None, per_chip: int | None) -> int | None:
        """Return the examples over all chips; None leaves the size to the workload or the data."""
        if batch_size is not None and per_chip is not None:
            raise ConfigError(
                f"batch_size={batch_size} and batch_size_per_chip={per_chip} both set the "
                "batch size; give one."
            )
        if batch_size is not None or (per_chip is None and self.config is None):
            return batch_size
        per_chip = per_chip or (None if self.config is None else self.config.batch_size_per_chip)
        return None if per_chip is None else per_chip * count_chips(self.devices)

    def _set_flags(self) -> None:
        """Set the flags that hold for the process; others are options of each compile."""
        if jax_state() == "initialised":
            self._notes.append(
                "flags of the process were not set, because jax has already started; create the "
                "trainer before anything uses a device"
            )
            return
        self.job.config.setup_environment_variables()


def _refuse_uncountable(**numbers: Any) -> None:
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ConfigError(f"{name} is {value!r}; give a whole number from 1 on.")


def _job_from_arguments(
    config: TPUConfig | None,
    model: object,
    *,
    mesh: Mapping[str, int],
    use_bf16: bool,
    enable_xla_optimizations: bool,
    optimizer: str | optax.GradientTransformation | None,
    settings: TrainingSettings | Mapping[str, Any] | None,
    folders: Mapping[str, str | Path | None],
    workload: Mapping[str, Any],
) -> Job:
    """Return the job of a trainer's arguments; objects that have no text become its `parts`."""
    _refuse_unknown(workload)
    values: dict[str, Any] = {"mesh": mesh}
    if config is not None:
        # Devices and batch size follow from what is here.
        values |= {
            setting.path: setting.value
            for setting in spell_as_job(config)
            if setting.path not in ("on", "mesh", "batch_size")
        }
    train = settings.to_dict() if isinstance(settings, TrainingSettings) else dict(settings or {})
    train |= {name: str(folder) for name, folder in folders.items() if folder is not None}
    if isinstance(optimizer, str):
        train["optimizer"] = optimizer
    if "precision" not in train:
        precision = _precision(config, model, use_bf16=use_bf16)
        values.pop("train.precision", None)
        train |= {} if precision is None else {"precision": precision}
    values |= {f"train.{name}": value for name, value in train.items()}
    if enable_xla_optimizations and not values.get("compile.xla_optimization_level"):
        values["compile.xla_optimization_level"] = DEFAULT_LEVEL
    stated = {name: value for name, value in workload.items() if value is not None}
    if optimizer is not None and not isinstance(optimizer, str):
        stated["optimizer"] = optimizer
    return Job.of(model, **values, **stated)


def _precision(config: TPUConfig | None, model: object, *, use_bf16: bool) -> str | None:
    """Return the format of the matmuls; None leaves a workload unchanged."""
    if config is not None and config.precision in NARROW:
        return config.precision
    if isinstance(model, Workload):
        return None
    if not use_bf16:
        return "float32"
    return "bfloat16" if config is None else config.get_memory_config().compute_dtype


def _refuse_unknown(workload: Mapping[str, Any]) -> None:
    """Refuse unknown arguments at once, not when the first step is built."""
    known = [name for name in inspect.signature(Workload).parameters if name != "model"]
    for name in workload:
        if name in TrainingSettings.model_fields and name not in known:
            raise ConfigError(
                f"{name} is a setting: TPUTrainer(settings=TrainingSettings({name}=…))."
            )
        if name not in known:
            own = [*inspect.signature(TPUTrainer).parameters, *TrainingSettings.model_fields]
            raise ConfigError(
                f"TPUTrainer has no argument '{name}'.{did_you_mean(name, [*known, *own])}"
            )
