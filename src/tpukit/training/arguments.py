"""From the arguments of `TPUTrainer` to the job they describe."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax

from ..errors import ConfigError, did_you_mean
from ..job.config import TPUConfig
from ..job.config.spelling import spell_as_job
from ..job.job import Job
from ..job.precision import NARROW
from ..job.train import TrainingSettings
from ..step.workload import Workload

DEFAULT_LEVEL = 2  # of compiler flags, where they are asked for without one


def job_of_arguments(
    config: TPUConfig | None,
    model: Any,
    *,
    use_bf16: bool,
    enable_xla_optimizations: bool,
    optimizer: str | optax.GradientTransformation | None,
    settings: TrainingSettings | Mapping[str, Any] | None,
    folders: Mapping[str, str | Path | None],
    workload: Mapping[str, Any],
) -> Job:
    """Return the job, with what only Python can say as its parts.

    Raises:
        ConfigError: Something is no argument, or a value is wrong.
    """
    _refuse_unknown(workload)
    values: dict[str, Any] = {}
    if config is not None:
        # The devices here decide how many there are, and the batch with them.
        spelled = {one.path: one.value for one in spell_as_job(config)}
        values |= {
            key: one for key, one in spelled.items() if key not in ("on", "mesh", "batch_size")
        }
    train = settings.to_dict() if isinstance(settings, TrainingSettings) else dict(settings or {})
    train |= {name: str(folder) for name, folder in folders.items() if folder is not None}
    if isinstance(optimizer, str):
        train["optimizer"] = optimizer
    values |= {f"train.{name}": value for name, value in train.items()}
    if "train.precision" not in {f"train.{name}" for name in train}:
        precision = _precision(config, model, use_bf16=use_bf16)
        values.pop("train.precision", None)
        values |= {} if precision is None else {"train.precision": precision}
    if enable_xla_optimizations and not values.get("compile.xla_optimization_level"):
        values["compile.xla_optimization_level"] = DEFAULT_LEVEL
    stated = {name: value for name, value in workload.items() if value is not None}
    if optimizer is not None and not isinstance(optimizer, str):
        stated["optimizer"] = optimizer
    return Job.of(model, **values, **stated)


def _precision(config: TPUConfig | None, model: Any, *, use_bf16: bool) -> str | None:
    """Return the format of the products; None leaves a workload as it is."""
    if config is not None and config.precision in NARROW:
        return config.precision
    if isinstance(model, Workload):
        return None
    if not use_bf16:
        return "float32"
    return "bfloat16" if config is None else config.get_memory_config().compute_dtype


def _refuse_unknown(workload: Mapping[str, Any]) -> None:
    """Refuse what is no argument at all now, not when the first step is built."""
    from .trainer import TPUTrainer

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
