"""`TPUTrainer`: a model, data and a mesh to a trained model, on CPU, GPU or TPU alike."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..errors import ConfigError, TPUModelError, did_you_mean
from ..job import Plan
from ..job.config import TPUConfig
from ..job.precision import ACTIVATIONS, NARROW, Precision, in_precision
from ..job.train import TrainingSettings
from ..parallel.mesh.here import MeshShape, fit_mesh, mesh_here, name_axes
from ..parallel.mesh.mesh import axis_sizes
from ..records.hooks import TrainingHook, make_hooks
from ..records.ledger import Ledger
from ..records.progress import NoProgress, ProgressView, make_progress
from ..records.throughput import count_chips
from ..runtime.jax_state import jax_state
from ..step.placement import strategy_for
from ..step.train_state import TrainState
from ..step.workload import Workload
from .predicted import predicted_step
from .preparation import ModelChoice, prepare
from .result import TrainingResult
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
        state: The trained state (step, params, opt_state, model_state), after `train()`.
        workload: What was trained, after `train()`.
    """

    def __init__(
        self,
        config: TPUConfig | None = None,
        model: Any = None,
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
        devices: Sequence[Any] | None = None,
        **workload: Any,
    ) -> None:
        if model is None:
            raise TPUModelError(
                "TPUTrainer needs a model, for example TPUTrainer(model='llama3.2-1b')."
            )
        _refuse_unknown(workload)
        self.config = config
        self.settings = _with_places(settings, optimizer, checkpoint_dir, run_dir)
        self._optimizer = None if isinstance(optimizer, str) else optimizer
        self._hooks, self._progress = tuple(hooks), progress
        self._plan: Plan | None = None
        self._notes: list[str] = []
        self.state: TrainState | None = None
        self.workload: Workload | None = None
        if enable_xla_optimizations:
            self._set_flags()
        self.devices = list(jax.devices() if devices is None else devices)
        sizes = name_axes(mesh_shape or (None if config is None else config.mesh_shape))
        self.mesh = mesh_here(sizes, self.devices, dcn_mesh_shape=dcn_mesh_shape)
        options = {**_memory_options(config), **workload}
        dtype, stated = _compute_dtype(config, use_bf16), _stated_precision(config, self.settings)
        if stated is not None:
            model, note = in_precision(model, stated)
            self._notes += [note] if note else []
            dtype = ACTIVATIONS[stated]
        if not isinstance(model, Workload) or strategy is not None:
            options["strategy"] = strategy or strategy_for(axis_sizes(self.mesh))
        self._choice = ModelChoice(model=model, compute_dtype=dtype, options=options)

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        *,
        train: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        **options: Any,
    ) -> "TPUTrainer":
        """The trainer of a plan; its `train:` section gives the settings.

        Where the plan's slice is not what is here, its mesh is fitted to the devices that are,
        and the run says so.

        Args:
            plan: What to train and how to place it.
            train: Settings that go before those of the plan's `train:` section.
            devices: The devices to use; all by default.
            **options: Of `TPUTrainer`.

        Raises:
            ConfigError: The `train:` section is wrong.
        """
        found = list(jax.devices() if devices is None else devices)
        name, moments = plan.optimizer_settings()
        planned = {"optimizer": name} | ({"moment_dtype": moments} if moments else {})
        own = plan.sections.get("train", {})
        settings = TrainingSettings.from_section({**planned, **own, **(train or {})})
        sizes, note = fit_mesh(plan.mesh, len(found), planned_for=plan.slice)
        sized = plan
        if plan.batch_size is None and plan.slice is None:
            sized = plan.replace(batch_size=len(found) * plan.microbatches)
        trainer = cls(
            model=sized.workload.replace(optimizer=None),
            mesh_shape=sizes,
            dcn_mesh_shape=None if note else plan.dcn_mesh,
            settings=settings,
            devices=found,
            **options,
        )
        trainer._plan = plan
        trainer._notes += [note] if note else []
        return trainer

    def train(
        self,
        train_data: Any = None,
        num_steps: int | None = None,
        batch_size_per_chip: int | None = None,
        sequence_length: int | None = None,
        *,
        batch_size: int | None = None,
        eval_data: Any = None,
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
        settings = self.settings
        total = settings.steps if num_steps is None else num_steps
        if total is None:
            raise ConfigError("for how many steps? Give num_steps (--steps, or steps in train:).")
        _refuse_uncountable(
            num_steps=total,
            batch_size=batch_size,
            batch_size_per_chip=batch_size_per_chip,
            sequence_length=sequence_length,
        )
        ledger = Ledger()
        prepared = prepare(
            self._choice,
            settings,
            mesh=self.mesh,
            train_data=train_data if train_data is not None else settings.data,
            eval_data=eval_data if eval_data is not None else settings.eval_data,
            batch_size=self._batch_size(batch_size, batch_size_per_chip),
            sequence_length=sequence_length,
            optimizer=self._optimizer,
            total_steps=total,
        )
        first = jax.process_index() == 0
        hooks = make_hooks((*self._hooks, *settings.hooks)) if first else ()
        with Session(
            prepared,
            settings,
            total_steps=total,
            ledger=ledger,
            progress=self._view() if first else NoProgress(),
            hooks=hooks,
            compiler_options=None if self._plan is None else self._plan.options,
        ) as session:
            for note in self._notes:
                session.say(note)
            result = session.run(predicted=predicted_step(self._plan))
        self.state, self.workload = session.state, prepared.work
        return result

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
        if jax_state() == "initialised":
            self._notes.append(
                "compiler flags were not set: jax has already started; make the trainer before "
                "anything uses a device"
            )
            return
        (self.config or TPUConfig()).setup_environment_variables()


def _refuse_unknown(workload: Mapping[str, Any]) -> None:
    """Refuse what is no argument at all now, not when the first step is built."""
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


def _refuse_uncountable(**numbers: Any) -> None:
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ConfigError(f"{name} is {value!r}; give a whole number from 1 on.")


def _with_places(
    settings: TrainingSettings | Mapping[str, Any] | None,
    optimizer: Any,
    checkpoint_dir: str | Path | None,
    run_dir: str | Path | None,
) -> TrainingSettings:
    given = {
        "optimizer": optimizer if isinstance(optimizer, str) else None,
        "checkpoint_dir": None if checkpoint_dir is None else str(checkpoint_dir),
        "run_dir": None if run_dir is None else str(run_dir),
    }
    own = settings.to_dict() if isinstance(settings, TrainingSettings) else settings or {}
    return TrainingSettings.from_section(own, **given)


def _compute_dtype(config: TPUConfig | None, use_bf16: bool) -> str:
    asked = "bfloat16" if config is None else config.get_memory_config().compute_dtype
    return asked if use_bf16 else "float32"


def _stated_precision(config: TPUConfig | None, settings: TrainingSettings) -> Precision | None:
    """What was asked for by name, which a `Workload` follows too."""
    if settings.precision is not None or config is None:
        return settings.precision
    return config.precision if config.precision in NARROW else None


def _memory_options(config: TPUConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    if config.gradient_checkpointing or config.memory_optimization == "aggressive":
        return {"remat": "full"}
    return {"remat": "minimal"} if config.enable_rematerialization else {}
