"""A trained model: loaded from a run, checkpoints or a Hugging Face folder, and exported to one."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError, did_you_mean
from ..models.adapters import TransformerAdapter
from ..models.generation.programs import DecodingPrograms
from ..models.huggingface.files import read_json
from ..models.huggingface.weights import export_huggingface, import_huggingface
from ..models.lora.adapter import LoraAdapter, with_low_rank
from ..models.lora.peft_files import CONFIG_FILE as ADAPTER_CONFIG
from ..models.lora.peft_files import read_peft, write_peft
from ..models.lora.spec import LoraSpec
from ..models.stored.placement import place_stored, stored_shardings
from ..models.stored.running import dense_parameters
from ..models.transformer.config import TransformerConfig
from ..parallel.mesh.mesh import create_mesh
from ..quantization.frozen import rounded_base, saved_base
from ..quantization.model_files import is_quantized_folder, load_quantized
from ..runtime.files import finish_folder, folder_beside
from ..step.host_memory import EXPORT_FILE_BYTES
from .checkpoint import Checkpoint, TPUCheckpointer
from .data.tokenizer_files import BYTES, TOKENIZER, keep_tokenizer
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
            `config.json` and safetensors, one that `tpukit quantize -o` wrote, whose parameters
            stay quantized, or one of adapters (peft) beside such a folder. Thin matrices are added
            to those they are beside.
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
    if (path / ADAPTER_CONFIG).is_file():
        return _from_peft(path, step, mesh)
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
    if run is None or _about_run(run).lora is not None:  # thin matrices are added to whole ones
        yield load_trained(source, step=step)
        return
    config, folder, tokenizer, _ = _about_run(run)
    with TPUCheckpointer(folder) as checkpointer:
        found = checkpointer.open(step if step is not None else own_step)
        yield TrainedModel(
            config=config,
            params=found.arrays,
            source=str(run),
            step=found.step,
            tokenizer=tokenizer,
        )


class _Run(NamedTuple):
    """What a run trained, where its checkpoints are, its tokenizer, and its thin matrices."""

    config: TransformerConfig
    checkpoints: str | Path
    tokenizer: str | None
    lora: LoraSpec | None


def _about_run(run: Path) -> _Run:
    about = read_run(run)
    model, settings = about["identity"]["model"], about["settings"]
    if not isinstance(model, dict):
        raise TPUModelError(
            f"{run} trained a model of its own, '{model}', and only reference transformers can be "
            "loaded without their code; restore its parameters with TPUCheckpointer."
        )
    config = TransformerConfig.from_dict(model)  # pyright: ignore[reportUnknownArgumentType]  JSON
    folder: str | Path = settings.get("checkpoint_dir") or run / "checkpoints"
    thin = about["identity"].get("lora")
    lora = None if thin is None else LoraSpec.from_dict(thin)
    said, kept = settings.get("tokenizer"), run / TOKENIZER
    words = str(kept) if said not in (None, BYTES) and kept.is_file() else said
    return _Run(config, folder, words, lora)


def _from_run(run: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    config, _, tokenizer, lora = _about_run(run)
    found = _restored(run, step, mesh)
    params = found.params
    if lora is not None:
        base = dense_parameters(found.items["model_state"]["base"])
        params = with_low_rank(base, params, lora)
    return TrainedModel(
        config=config,
        params=params,
        source=str(run),
        step=found.step,
        tokenizer=tokenizer,
    )


def _from_quantized(folder: Path, mesh: Mesh | None) -> TrainedModel:
    found = load_quantized(folder)
    if found.config is None:
        raise TPUModelError(
            f"{folder} holds a model of one's own, and only reference transformers can be loaded "
            "without their code; use tpukit.quantization.load_quantized(folder, like=…)."
        )
    params = found.params
    if mesh is not None and mesh.size > 1:
        params = place_stored(params, DecodingPrograms(found.config, mesh).layout.shardings)
    return TrainedModel(
        config=found.config,
        params=params,
        source=str(folder),
        step=None,
        tokenizer=found.tokenizer,
    )


def _restored(run: Path, step: int | None, mesh: Mesh | None = None) -> Checkpoint:
    """What a run saved of its model: split as `generate` wants it, or on the first device here."""
    config, folder, _, lora = _about_run(run)
    here = mesh or create_mesh(mesh_shape=(1,), axis_names=("tensor",), devices=jax.devices()[:1])
    base = DecodingPrograms(config, here).abstract_params()
    like = {"params": base}
    if lora is not None:
        keep = _kept_base(run, config, lora)
        base = base if keep is None else _placed(jax.eval_shape(keep, base), base)
        adapter = LoraAdapter(TransformerAdapter(config), lora, keep)
        thin = jax.eval_shape(adapter.init, jax.random.key(0)).params
        place = NamedSharding(here, PartitionSpec())
        whole = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), thin
        )
        like = {"params": whole, "model_state": {"base": base, "carried": {}}}
    with TPUCheckpointer(folder) as checkpointer:
        return checkpointer.restore(step, like=like)


def _kept_base(run: Path, config: TransformerConfig, lora: LoraSpec) -> Any:
    """What a run kept its model's own parameters as, a function of them; None for as they are."""
    source = read_run(run)["settings"].get("init_from")
    if lora.base is not None:
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        return rounded_base(config, lora.base, {"inputs": tokens})
    if source is not None and is_quantized_folder(Path(source).expanduser()):
        return saved_base(source)
    return None


def _placed(kept: PyTree, dense: PyTree) -> PyTree:
    """Shapes of stored parameters with shardings, from those of the same as arrays."""
    places = stored_shardings(kept, jax.tree.map(lambda leaf: leaf.sharding, dense))
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        kept,
        places,
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
    tokenizer = folder / TOKENIZER
    return TrainedModel(
        config=found.config,
        params=found.params,
        source=str(folder),
        step=None,
        tokenizer=str(tokenizer) if tokenizer.is_file() else None,
    )


def _from_peft(folder: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or not Path(base).expanduser().is_dir():
        raise TPUValidationError(
            f"{folder} holds adapters beside '{base}', which is no folder here; write that model's "
            f"folder as base_model_name_or_path in its {ADAPTER_CONFIG}."
        )
    beside = Path(base).expanduser()
    if is_quantized_folder(beside):
        model = _from_quantized(beside, mesh)
    else:
        model = _from_huggingface(beside, step, mesh)
    adapter = read_peft(folder, model.config)
    wide = dense_parameters(jax.tree.map(jnp.asarray, model.params))
    params = with_low_rank(wide, adapter.params, adapter.spec)
    return replace(model, params=params, source=f"{folder} beside {base}")


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


def export_run(
    source: str | Path, folder: str | Path, *, step: int | None = None, adapters: bool = False
) -> Export:
    """Write a run's parameters in the Hugging Face layout, as they are, bit for bit.

    Of a run that trained adapters (LoRA), the sum of them and the model's own is written; or with
    `adapters` they alone, in the layout that `peft` reads.

    They are read one at a time: host memory for the largest one and for one file is enough,
    whatever the size of the model. The folder appears only when it is complete. The tokenizer that
    the run used goes along as a `tokenizer.json`, bytes too.

    Args:
        source: See `load_trained`.
        folder: Must not be there, or be empty.
        step: Which checkpoint; the newest good one by default.
        adapters: Write the adapters of a run, and no other parameters.

    Raises:
        TPUValidationError: The folder holds files already, or there is no model at `source`.
        TPUModelError: The model has a feature that no Hugging Face architecture has.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TPUValidationError(
            f"{target} is there already and is not overwritten; name a new folder, or empty it."
        )
    if adapters:
        return _export_adapters(source, target, step)
    with _opened(source, step) as model, folder_beside(target) as made:
        params = dense_parameters(model.params)
        export_huggingface(params, model.config, made, max_shard_bytes=EXPORT_FILE_BYTES)
        keep_tokenizer(model.tokenizer, made)
        for file in made.glob("*.safetensors"):  # written for their owner alone
            shutil.copymode(made / "config.json", file)
        finish_folder(made, target)
    return _written(target, model.source, model.step, model.config.parameter_count().total)


def _export_adapters(source: str | Path, target: Path, step: int | None) -> Export:
    run, own_step = _run_of(_existing(source))
    about = None if run is None else _about_run(run)
    if run is None or about is None or about.lora is None:
        raise TPUValidationError(
            f"{source} trained no adapters; leave --adapters out, and the whole model is written."
        )
    found = _restored(run, step if step is not None else own_step)
    base = read_run(run)["settings"].get("init_from")
    with folder_beside(target) as made:
        write_peft(found.params, about.lora, about.config, made, base=base)
        finish_folder(made, target)
    count = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    return _written(target, str(run), found.step, count)


def _written(target: Path, source: str, step: int | None, parameters: int) -> Export:
    files = sorted(target.iterdir())
    return Export(
        source=source,
        step=step,
        folder=str(target),
        files=tuple(file.name for file in files),
        size_bytes=sum(file.stat().st_size for file in files),
        parameters=parameters,
    )
