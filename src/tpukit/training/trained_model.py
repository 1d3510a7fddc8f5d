"""A trained model, from wherever it lies: a run, its checkpoints, a Hugging Face folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..errors import TPUModelError, TPUValidationError, did_you_mean
from ..models.adapters import TransformerAdapter
from ..models.huggingface.weights import import_huggingface
from ..models.transformer.config import TransformerConfig
from .checkpoint import TPUCheckpointer
from .run_directory import IDENTITY, read_run


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A reference transformer and its parameters.

    Attributes:
        config: What it is.
        params: Its parameters, on the first device here.
        source: Where they came from.
        step: After how many steps; None where nobody wrote it down.
        tokenizer: What its text was made into tokens with, or None where that is not known.
    """

    config: TransformerConfig
    params: Any
    source: str
    step: int | None
    tokenizer: str | None


def load_trained(source: str | Path, *, step: int | None = None) -> TrainedModel:
    """Load a trained model.

    Args:
        source: A run directory, its folder of checkpoints or one of them, or a folder with
            `config.json` and safetensors.
        step: Of a run: which checkpoint; the newest good one by default.

    Raises:
        TPUValidationError: It is none of these.
        TPUModelError: The model is not a reference transformer.
        TPUCheckpointError: There is no good checkpoint.
    """
    path = Path(source).expanduser()
    if not os.path.exists(path):  # Path.exists() minds a name that is too long
        siblings = [entry.name for entry in path.parent.glob("*")]
        raise TPUValidationError(
            f"{path} is not there; give a run directory or a Hugging Face folder."
            + did_you_mean(path.name, siblings)
        )
    run, own_step = _run_of(path)
    if run is not None:
        return _from_run(run, step if step is not None else own_step)
    if (path / "config.json").is_file():
        return _from_huggingface(path, step)
    raise TPUValidationError(
        f"{path} is neither a run ({IDENTITY} is missing) nor a Hugging Face folder (config.json "
        "is missing); give the run directory that 'tpukit train' named."
    )


def _run_of(path: Path) -> tuple[Path | None, int | None]:
    """The run that a path belongs to, and the step where it names one."""
    if (path / IDENTITY).is_file():
        return path, None
    path = path.resolve()
    if (path.parent / IDENTITY).is_file():
        return path.parent, None
    if path.name.isdigit() and (path.parent.parent / IDENTITY).is_file():
        return path.parent.parent, int(path.name)
    return None, None


def _from_run(run: Path, step: int | None) -> TrainedModel:
    about = read_run(run)
    model, settings = about["identity"]["model"], about["settings"]
    if not isinstance(model, dict):
        raise TPUModelError(
            f"{run} trained a model of its own, '{model}', and only reference transformers can be "
            "loaded without their code; restore its parameters with TPUCheckpointer."
        )
    config = TransformerConfig.from_dict(model)  # pyright: ignore[reportUnknownArgumentType]  JSON
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: TransformerAdapter(config).init(jax.random.key(0)).params)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes
    )
    folder = settings.get("checkpoint_dir") or run / "checkpoints"
    with TPUCheckpointer(folder) as checkpointer:
        found = checkpointer.restore(step, like={"params": like})
    return TrainedModel(
        config=config,
        params=found.params,
        source=str(run),
        step=found.step,
        tokenizer=settings.get("tokenizer"),
    )


def _from_huggingface(folder: Path, step: int | None) -> TrainedModel:
    if step is not None:
        raise TPUValidationError(
            f"step={step} names a checkpoint of a run, and {folder} is a Hugging Face folder; "
            "leave the step out."
        )
    found = import_huggingface(folder)
    tokenizer = folder / "tokenizer.json"
    return TrainedModel(
        config=found.config,
        params=found.params,
        source=str(folder),
        step=None,
        tokenizer=str(tokenizer) if tokenizer.is_file() else None,
    )
