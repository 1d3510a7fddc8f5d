"""`TPUTrainer`: a model, data and a mesh to a trained model, on CPU, GPU or TPU alike."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..annotations import Device
from ..errors import ConfigError, TPUModelError
from ..hardware.mesh_sizes import fit_mesh, write_mesh
from ..hardware.target import current_target
from ..job.compiler_flags import compiler_options
from ..job.config import TPUConfig
from ..job.job import Job
from ..job.train import TrainingSettings
from ..parallel.mesh.axes import MeshShape, name_axes
from ..parallel.mesh.mesh import axis_sizes, mesh_here
from ..records.hooks import TrainingHook, make_hooks
from ..records.ledger import Ledger
from ..records.progress import NoProgress, ProgressView, make_progress
from ..records.throughput import count_chips
from ..runtime.environment import jax_state, open_devices
from ..step.parts import TrainState
from ..step.workload import Workload
from .arguments import job_of_arguments
from .data.opening import DataSource
from .preparation import PreparedRun, predicted_step, prepare
from .result import TrainingResult
from .run_directory import RunDirectory
from .session import Session


class TPUTrainer:
    """Trains a model.

    ```python
    trainer = TPUTrainer(model="llama3.2-1b", mesh_shape=(8, 8), run_dir="runs/one")
    result = trainer.train("gs://bucket/tokens/", num_steps=100_000, batch_size_per_chip=16,
                           sequence_length=4096)
    ```

    Calling it again with the same `run_dir` goes on from the newest good checkpoint there, with
    the same numbers as if it had never stopped.

    Args:
        config: Chips, precision and memory settings; what is here is used without it.
        model: A preset's name, a `TransformerConfig`, a flax nnx, flax linen or equinox module, a
            pair (init, apply), or a whole `Workload`.
        mesh_shape: Devices along each axis: sizes by name, or numbers for fsdp, fsdp x tensor or
            data x fsdp x tensor. All devices on "fsdp" by default.
        use_bf16: Compute in bfloat16 with float32 master parameters, gradients and loss; False
            computes in float32. A `Workload` is taken as it is.
        enable_xla_optimizations: Set the TPU compiler flags of `config.xla_optimization_level`;
            on other devices there is nothing to set.
        optimizer: A name, or any optax transformation; the settings' otherwise.
        checkpoint_dir: Where checkpoints go; `run_dir/checkpoints` by default, gs:// is fine.
        run_dir: The run's own folder; a new one under runs/ by default.
        settings: Everything else; see `TrainingSettings`. A mapping of its fields will do.
        dcn_mesh_shape: For several slices: the factor of each axis that runs across them.
        strategy: How parameters are split; follows from the names of the axes by default.
        hooks: Further hooks, by name or your own, beside those named in the settings.
        progress: Whether to show progress on standard error, or a view of your own.
        devices: The devices to use; all by default.
        **workload: Further arguments of `Workload`: remat, microbatches, loss, batch, inputs, …

    Attributes:
        job: What is trained and how, as `tpukit.check` takes it.
        state: The trained state (step, params, opt_state, model_state), after `train()`.
        workload: What was trained, after `train()`.
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
        sizes = name_axes(mesh_shape or (None if config is None else config.mesh_shape))
        job = job_of_arguments(
            config,
            model,
            use_bf16=use_bf16,
            enable_xla_optimizations=enable_xla_optimizations,
            optimizer=optimizer,
            settings=settings,
            folders={"checkpoint_dir": checkpoint_dir, "run_dir": run_dir},
            workload={"strategy": strategy, **workload},
        )
        self._open(job.replace(mesh=sizes), dcn_mesh_shape, hooks, progress, devices)
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
        """Return the trainer of a job, whose step is the one that `check` compiles.

        Where the job's slice is not what is here, its mesh is fitted to the devices that are,
        and the run says so.

        Args:
            job: What to train, how to place it, and its `train:` section.
            hooks: As of `TPUTrainer`.
            progress: As of `TPUTrainer`.
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
        """Location a job on the devices that are here."""
        self.state: TrainState | None = None
        self.workload: Workload | None = None
        self._hooks, self._progress = tuple(hooks), progress
        self._notes: list[str] = []
        self.devices = list(open_devices() if devices is None else devices)
        here = len(self.devices)
        sizes = dict(job.mesh) if job.on is None else fit_mesh(job.mesh, here)
        planned = None if job.on is None else job.slice.devices
        elsewhere = planned not in (None, here)
        if elsewhere:
            self._notes.append(
                f"the job is for the {planned} devices of {job.on}, {write_mesh(job.mesh_sizes)}; "
                f"here are {here}: {write_mesh(sizes)}"
            )
        self.mesh = mesh_here(sizes, self.devices, dcn_mesh_shape=None if elsewhere else dcn_mesh)
        # The slice it runs on, not the one it was planned for.
        is_there = not elsewhere and self.devices[0].platform == "tpu"
        self._slice = job.on if is_there else None
        self.job = job
        examples = job.examples if job.on is not None else job.batch_size
        # The same step, on the devices here: neither the slice nor its mesh says how many.
        self._here = job.replace(on=None, mesh=axis_sizes(self.mesh), batch_size=examples)

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
            num_steps: Of the whole run: a run that resumes at 600 of 1000 takes 400 more.
            batch_size_per_chip: Examples a chip and step.
            sequence_length: Tokens in an example; 2048, or the model's longest if that is shorter.
            batch_size: Examples a step over all chips, instead of per chip.
            eval_data: Evaluated every `eval_every` steps and at the end.

        Raises:
            ConfigError: Something is missing or wrong in the settings.
            TPUValidationError: The data, or the run directory, are not for this run.
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
        stated = {
            "train.steps": total,
            "batch_size": self._batch_size(batch_size, batch_size_per_chip),
            "sequence_length": sequence_length,
        }
        changes = {key: value for key, value in stated.items() if value is not None}
        job = self._here.replace(changes)
        self.job = self.job.replace(changes)
        settings = job.train
        with ledger.doing("initialise"):
            prepared = self._prepare(job, train_data, eval_data)
        notes = [*self._notes, *prepared.notes]
        first = jax.process_index() == 0
        with Session(
            prepared,
            settings,
            total_steps=total,
            ledger=ledger,
            progress=self._view() if first else NoProgress(),
            hooks=self._make_hooks(job),
            compiler_options=self._compiler_options(),
            log_placement=job.observe.log_device_placement,
            on=self._slice,
        ) as session:
            for note in notes:
                session.say(note)
            result = session.run(predicted=predicted_step(self.job))
        self.state, self.workload = session.state, prepared.work
        return result

    def check(self) -> str:
        """Raise what `train()` would refuse before its first step, and write nothing.

        Returns:
            What would be trained, in one line.
        """
        total = self._total_steps(None)
        prepared = self._prepare(self._here, None, None)
        self._make_hooks(self._here)
        settings = self._here.train
        if settings.run_dir is not None:
            RunDirectory(settings.run_dir).refuse_other(
                prepared.identity(settings), recipe=prepared.recipe(settings)
            )
        return prepared.headline(total)

    def _total_steps(self, num_steps: int | None) -> int:
        total = self.settings.steps if num_steps is None else num_steps
        if total is None:
            raise ConfigError("for how many steps? Give num_steps (--steps, or steps in train:).")
        return total

    def _prepare(
        self, job: Job, train_data: DataSource | None, eval_data: DataSource | None
    ) -> PreparedRun:
        settings = job.train
        prepared = prepare(
            job,
            mesh=self.mesh,
            train_data=train_data if train_data is not None else settings.data,
            eval_data=eval_data if eval_data is not None else settings.eval_data,
        )
        notes = [*self._notes, *prepared.notes]
        if notes and job.observe.enable_strict_validation:
            raise ConfigError(f"enable_strict_validation is set, and {'; '.join(notes)}.")
        return prepared

    def _make_hooks(self, job: Job) -> list[TrainingHook]:
        wanted = (*self._hooks, *job.train.hooks, *(["profile"] * job.observe.enable_profiling))
        return make_hooks(wanted, process=jax.process_index())

    def _compiler_options(self) -> dict[str, Any]:
        """Return the options of a TPU's compiler; no other backend knows them."""
        if jax.default_backend() != "tpu":
            return {}
        asked = compiler_options(self.job.compile, generation=current_target())
        return {**asked, **self.job.options}

    def _view(self) -> ProgressView:
        return make_progress(self._progress) if isinstance(self._progress, bool) else self._progress

    def _batch_size(self, batch_size: int | None, per_chip: int | None) -> int | None:
        """Examples over all chips; None where the workload or the data say it."""
        if batch_size is not None and per_chip is not None:
            raise ConfigError(
                f"batch_size={batch_size} and batch_size_per_chip={per_chip} both say how large a "
                "batch is; give one."
            )
        if batch_size is not None or (per_chip is None and self.config is None):
            return batch_size
        per_chip = per_chip or (None if self.config is None else self.config.batch_size_per_chip)
        return None if per_chip is None else per_chip * count_chips(self.devices)

    def _set_flags(self) -> None:
        """Set flags of the whole process; those of one compile are its options."""
        if jax_state() == "initialised":
            self._notes.append(
                "flags of the whole process were not set: jax has already started; make the "
                "trainer before anything uses a device"
            )
            return
        self.job.config.setup_environment_variables()


def _refuse_uncountable(**numbers: Any) -> None:
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ConfigError(f"{name} is {value!r}; give a whole number from 1 on.")
