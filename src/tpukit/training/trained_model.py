"""A trained model: loaded from a run, checkpoints or a Hugging Face folder, and exported to one."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.table import Table

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError, did_you_mean
from ..models.generation.programs import DecodingPrograms
from ..models.huggingface.weights import export_huggingface, import_huggingface
from ..models.transformer.config import TransformerConfig
from ..parallel.mesh.mesh import create_mesh
from ..quantization.model_files import is_quantized_folder, load_quantized
from ..runtime.files import finish_folder, folder_beside
from ..step.host_memory import EXPORT_FILE_BYTES
from .checkpoint import TPUCheckpointer
from .run_directory import IDENTITY, read_run


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A reference transformer and its parameters.

    Attributes:
        config: What it is.
        params: Its parameters, on the first device or the host; or split over a mesh.
        source: Where they came from.
        step: After how many steps; None where nobody wrote it down.
        tokenizer: What its text was made into tokens with, or None where that is not known.
    """

    config: TransformerConfig
    params: Any
    source: str
    step: int | None
    tokenizer: str | None


def load_trained(
    source: str | Path, *, step: int | None = None, mesh: Mesh | None = None
) -> TrainedModel:
    """Load a trained model.

    Args:
        source: A run directory, its folder of checkpoints or one of them, a folder with
            `config.json` and safetensors, or one that `tpukit quantize -o` wrote, whose
            parameters stay quantized.
        step: Of a run: which checkpoint; the newest good one by default.
        mesh: Parameters are read straight into their parts on it, as `generate` wants them.

    Raises:
        TPUValidationError: It is none of these.
        TPUModelError: The model is not a reference transformer.
        TPUCheckpointError: There is no good checkpoint.
    """
    path = _existing(source)
    run, own_step = _run_of(path)
    if run is not None:
        return _from_run(run, step if step is not None else own_step, mesh)
    if is_quantized_folder(path):
        return _from_quantized(path, mesh)
    if (path / "config.json").is_file():
        return _from_huggingface(path, step, mesh)
    raise TPUValidationError(
        f"{path} is neither a run ({IDENTITY} is missing) nor a Hugging Face folder (config.json "
        "is missing); give the run directory that 'tpukit train' named."
    )


def _existing(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if not os.path.exists(path):  # Path.exists() minds a name that is too long
        siblings = [entry.name for entry in path.parent.glob("*")]
        raise TPUValidationError(
            f"{path} is not there; give a run directory or a Hugging Face folder."
            + did_you_mean(path.name, siblings)
        )
    return path


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


@contextmanager
def _opened(source: str | Path, step: int | None) -> Generator[TrainedModel]:
    """The model at `source`; the parameters of a run are read one by one when asked for."""
    run, own_step = _run_of(_existing(source))
    if run is None:
        yield load_trained(source, step=step)
        return
    config, folder, tokenizer = _about_run(run)
    with TPUCheckpointer(folder) as checkpointer:
        found = checkpointer.open(step if step is not None else own_step)
        yield TrainedModel(
            config=config,
            params=found.arrays,
            source=str(run),
            step=found.step,
            tokenizer=tokenizer,
        )


def _about_run(run: Path) -> tuple[TransformerConfig, str | Path, str | None]:
    """What a run trained, where its checkpoints are, and its tokenizer."""
    about = read_run(run)
    model, settings = about["identity"]["model"], about["settings"]
    if not isinstance(model, dict):
        raise TPUModelError(
            f"{run} trained a model of its own, '{model}', and only reference transformers can be "
            "loaded without their code; restore its parameters with TPUCheckpointer."
        )
    config = TransformerConfig.from_dict(model)  # pyright: ignore[reportUnknownArgumentType]  JSON
    folder: str | Path = settings.get("checkpoint_dir") or run / "checkpoints"
    return config, folder, settings.get("tokenizer")


def _from_run(run: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    config, folder, tokenizer = _about_run(run)
    here = mesh or create_mesh(mesh_shape=(1,), axis_names=("tensor",), devices=jax.devices()[:1])
    like = DecodingPrograms(config, here).abstract_params()
    with TPUCheckpointer(folder) as checkpointer:
        found = checkpointer.restore(step, like={"params": like})
    return TrainedModel(
        config=config,
        params=found.params,
        source=str(run),
        step=found.step,
        tokenizer=tokenizer,
    )


def _from_quantized(folder: Path, mesh: Mesh | None) -> TrainedModel:
    if mesh is not None:
        raise TPUValidationError(
            f"{folder} is quantized, and such a model is loaded onto one device; leave the mesh out."
        )
    found = load_quantized(folder)
    if found.config is None:
        raise TPUModelError(
            f"{folder} holds a model of one's own, and only reference transformers can be loaded "
            "without their code; use tpukit.quantization.load_quantized(folder, like=…)."
        )
    return TrainedModel(
        config=found.config,
        params=found.params,
        source=str(folder),
        step=None,
        tokenizer=found.tokenizer,
    )


def _from_huggingface(folder: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    if step is not None:
        raise TPUValidationError(
            f"step={step} names a checkpoint of a run, and {folder} is a Hugging Face folder; "
            "leave the step out."
        )

    def split(config: TransformerConfig) -> PyTree:
        return DecodingPrograms(config, mesh).layout.shardings

    found = import_huggingface(folder, shardings=None if mesh is None else split)
    tokenizer = folder / "tokenizer.json"
    return TrainedModel(
        config=found.config,
        params=found.params,
        source=str(folder),
        step=None,
        tokenizer=str(tokenizer) if tokenizer.is_file() else None,
    )


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written where."""

    source: str
    step: int | None
    folder: str
    files: tuple[str, ...]
    size_bytes: int
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "files": list(self.files)}

    def __rich__(self) -> Table:
        table = Table(show_header=False, title=f"exported to {self.folder}")
        table.add_row("from", f"{self.source}, step {self.step}")
        table.add_row("parameters", f"{self.parameters:,}")
        table.add_row("files", ", ".join(self.files))
        table.add_row("size", f"{self.size_bytes / 1e6:,.1f} MB")
        return table


def export_run(source: str | Path, folder: str | Path, *, step: int | None = None) -> Export:
    """Write a run's parameters in the Hugging Face layout, as they are, bit for bit.

    They are read one at a time: host memory for the largest one and for one file is enough,
    whatever the size of the model. The folder appears only when it is complete. A
    `tokenizer.json` that the run used goes along.

    Args:
        source: See `load_trained`.
        folder: Must not be there, or be empty.
        step: Which checkpoint; the newest good one by default.

    Raises:
        TPUValidationError: The folder holds files already, or there is no model at `source`.
        TPUModelError: The model has a feature that no Hugging Face architecture has.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TPUValidationError(
            f"{target} is there already and is not overwritten; name a new folder, or empty it."
        )
    with _opened(source, step) as model, folder_beside(target) as made:
        export_huggingface(model.params, model.config, made, max_shard_bytes=EXPORT_FILE_BYTES)
        if model.tokenizer is not None and (file := _tokenizer_file(model.tokenizer)) is not None:
            shutil.copyfile(file, made / "tokenizer.json")
        for file in made.glob("*.safetensors"):  # written for their owner alone
            shutil.copymode(made / "config.json", file)
        finish_folder(made, target)
    files = sorted(target.iterdir())
    return Export(
        source=model.source,
        step=model.step,
        folder=str(target),
        files=tuple(file.name for file in files),
        size_bytes=sum(file.stat().st_size for file in files),
        parameters=model.config.parameter_count().total,
    )


def _tokenizer_file(tokenizer: str) -> Path | None:
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.is_file() else None
