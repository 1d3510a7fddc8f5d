"""Trained models, loaded from a run, a Hugging Face folder, a quantized one, or peft adapters."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..annotations import AnyMesh, PyTree
from ..errors import TPUModelError, TPUValidationError, did_you_mean
from ..models.adapters import TransformerAdapter
from ..models.generation.programs import DecodingPrograms
from ..models.huggingface.config import config_from_huggingface, read_generation_config
from ..models.huggingface.files import read_json
from ..models.huggingface.weights import import_huggingface
from ..models.lora.adapter import LoraAdapter, with_low_rank
from ..models.lora.peft_files import CONFIG_FILE as ADAPTER_CONFIG
from ..models.lora.peft_files import read_peft
from ..models.lora.spec import LoraSpec
from ..models.stored.placement import place_stored, stored_shardings
from ..models.stored.running import dense_parameters
from ..models.transformer.config import TransformerConfig
from ..parallel.mesh.mesh import create_mesh
from ..quantization.files.model_files import is_quantized_folder, load_quantized
from ..quantization.uniform import rounded_base, saved_base
from ..records.mirror import address_of, readable
from ..records.names import CHECKPOINTS_FOLDER, IDENTITY_FILE
from ..runtime.object_store import is_address
from ..step.workload import Workload
from .checkpoint import Checkpoint, TPUCheckpointer
from .data.tokenizer import BYTES, TOKENIZER
from .run_directory import read_run


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A reference transformer and its parameters.

    Attributes:
        config: The model's configuration.
        params: Its parameters, on the first device or the host, or sharded over a mesh.
        source: The run or folder that they were read from.
        step: The step of the checkpoint; None if unknown.
        tokenizer: The tokenizer of its text, as `load_tokenizer` takes it; None if unknown.
        generation: Entries of its `generation_config.json`, such as end tokens.
    """

    config: TransformerConfig
    params: Any
    source: str
    step: int | None
    tokenizer: str | None
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_trained(
    source: str | Path, *, step: int | None = None, mesh: Mesh | None = None
) -> TrainedModel:
    """Load a trained model.

    Args:
        source: A run directory, its checkpoint folder or one checkpoint; a folder with
            `config.json` and safetensors; a folder that `tpukit quantize -o` wrote, with
            parameters that stay quantized; or a folder of peft adapters. LoRA matrices are added
            to the weights that they belong to.
        step: The run's checkpoint to load; the newest good one by default.
        mesh: Each parameter is read straight into its shards on this mesh, as `generate` needs.

    Raises:
        TPUValidationError: There is no such model at `source`.
        TPUModelError: The model is not a reference transformer.
        TPUCheckpointError: There is no good checkpoint.
    """
    path = existing_path(source)
    run, own_step = find_run(path)
    if run is not None:
        return _from_run(run, step if step is not None else own_step, mesh)
    if is_quantized_folder(path):
        return _from_quantized(path, mesh)
    if (path / "config.json").is_file():
        return _from_huggingface(path, step, mesh)
    if (path / ADAPTER_CONFIG).is_file():
        return _from_peft(path, step, mesh)
    raise TPUValidationError(
        f"{path} is neither a run ({IDENTITY_FILE} is missing) nor a Hugging Face folder "
        "(config.json is missing); give the run directory that 'tpukit train' named."
    )


def _from_run(run: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    config, _, tokenizer, lora = read_saved(run)
    saved = restore_saved(run, step, mesh)
    params = saved.params
    if lora is not None:
        base = dense_parameters(saved.items["model_state"]["base"])
        params = with_low_rank(base, params, lora)
    return TrainedModel(
        config=config,
        params=params,
        source=address_of(run),
        step=saved.step,
        tokenizer=tokenizer,
        generation=read_generation_config(run),
    )


def _from_quantized(folder: Path, mesh: Mesh | None) -> TrainedModel:
    model = load_quantized(folder)
    if model.config is None:
        raise TPUModelError(
            f"{folder} contains a user's own model, and only reference transformers can be loaded "
            "without their code; use tpukit.quantization.load_quantized(folder, like=…)."
        )
    params = model.params
    if mesh is not None and mesh.size > 1:
        params = place_stored(params, DecodingPrograms(model.config, mesh).layout.shardings)
    return TrainedModel(
        config=model.config,
        params=params,
        source=str(folder),
        step=None,
        tokenizer=BYTES if model.tokenizer == BYTES else _kept_tokenizer(folder) or model.tokenizer,
        generation=read_generation_config(folder),
    )


def _from_huggingface(folder: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    if step is not None:
        raise TPUValidationError(
            f"step={step} names a checkpoint of a run, but {folder} is a Hugging Face folder; "
            "leave the step out."
        )

    def split(config: TransformerConfig) -> PyTree:
        return DecodingPrograms(config, mesh).layout.shardings

    imported = import_huggingface(folder, shardings=None if mesh is None else split)
    about = read_json(folder / "config.json")
    wide = "float32" in (about.get("dtype"), about.get("torch_dtype"))
    return TrainedModel(
        config=imported.config.replace(dtype="float32") if wide else imported.config,
        params=imported.params,
        source=str(folder),
        step=None,
        tokenizer=_kept_tokenizer(folder),
        generation=read_generation_config(folder),
    )


def _kept_tokenizer(folder: Path) -> str | None:
    file = folder / TOKENIZER
    return str(file) if file.is_file() else None


def _from_peft(folder: Path, step: int | None, mesh: Mesh | None) -> TrainedModel:
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or not Path(base).expanduser().is_dir():
        raise TPUValidationError(
            f"{folder} contains adapters of '{base}', which is not a folder here; set "
            f"base_model_name_or_path in its {ADAPTER_CONFIG} to that model's folder."
        )
    model = load_trained(base, step=step, mesh=mesh)
    adapter = read_peft(folder, model.config)
    wide = dense_parameters(jax.tree.map(jnp.asarray, model.params))
    params = with_low_rank(wide, adapter.params, adapter.spec)
    return replace(model, params=params, source=f"{folder} on {base}")


def existing_path(source: str | Path) -> Path:
    """Return the local path of a model; of a run at an address, that of its copy.

    Raises:
        TPUValidationError: The path does not exist.
    """
    if is_address(source):
        address = str(source).rstrip("/")
        inside = re.search(rf"/{CHECKPOINTS_FOLDER}(/\d+)?$", address, re.ASCII)
        if inside is None:
            return readable(address)
        return readable(address[: inside.start()]) / inside[0].strip("/")
    path = Path(source).expanduser()
    if not os.path.exists(path):  # Path.exists() raises for a name that is too long
        siblings = [entry.name for entry in path.parent.glob("*")]
        raise TPUValidationError(
            f"{path} does not exist; give a run directory or a Hugging Face folder."
            + did_you_mean(path.name, siblings)
        )
    return path


def find_run(path: Path) -> tuple[Path | None, int | None]:
    """Return the run that a path belongs to, and the step if the path names one."""
    if (path / IDENTITY_FILE).is_file():
        return path, None
    path = path.resolve()
    if (path.parent / IDENTITY_FILE).is_file():
        return path.parent, None
    if path.name.isdigit() and (path.parent.parent / IDENTITY_FILE).is_file():
        return path.parent.parent, int(path.name)
    return None, None


def checkpoints_of(run: Path) -> str:
    """Return the folder or address of a run's checkpoints, unless `checkpoint_dir` is set."""
    return f"{address_of(run)}/{CHECKPOINTS_FOLDER}"


class SavedRun(NamedTuple):
    """A run's model, checkpoint folder, tokenizer, and LoRA specification."""

    config: TransformerConfig
    checkpoints: str | Path
    tokenizer: str | None
    lora: LoraSpec | None


def read_saved(run: Path) -> SavedRun:
    """Read from a run directory which model it trained.

    Raises:
        TPUModelError: It is a user's own model.
    """
    about = read_run(run)
    model, settings = about["identity"]["model"], about["settings"]
    if not isinstance(model, dict):
        raise TPUModelError(
            f"{run} trained a user's own model, '{model}', and only reference transformers can be "
            f"loaded without their code; `tpukit export {run} out/` writes it in the files of its "
            "framework."
        )
    config = TransformerConfig.from_dict(model)  # pyright: ignore[reportUnknownArgumentType]  JSON
    folder: str | Path = settings.get("checkpoint_dir") or checkpoints_of(run)
    spec = about["identity"].get("lora")
    lora = None if spec is None else LoraSpec.from_dict(spec)
    tokenizer = settings.get("tokenizer")
    if tokenizer not in (None, BYTES):
        tokenizer = _kept_tokenizer(run) or tokenizer
    return SavedRun(config, folder, tokenizer, lora)


def restore_saved(run: Path, step: int | None, mesh: Mesh | None = None) -> Checkpoint:
    """Restore a run's checkpoint, sharded over a mesh or on the first device here."""
    config, folder, _, lora = read_saved(run)
    here = mesh or create_mesh(mesh_shape=(1,), axis_names=("tensor",), devices=jax.devices()[:1])
    base = DecodingPrograms(config, here).abstract_params()
    like = {"params": base}
    if lora is not None:
        keep = _base_storage(run, config, lora)
        base = base if keep is None else _placed(jax.eval_shape(keep, base), base)
        adapter = LoraAdapter(TransformerAdapter(config), lora, keep)
        matrices = jax.eval_shape(adapter.init, jax.random.key(0)).params
        everywhere = NamedSharding(here, PartitionSpec())
        replicated = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), matrices
        )
        like = {"params": replicated, "model_state": {"base": base, "carried": {}}}
    with TPUCheckpointer(folder) as checkpointer:
        return checkpointer.restore(step, like=like)


def _base_storage(
    run: Path, config: TransformerConfig, lora: LoraSpec
) -> Callable[[PyTree], PyTree] | None:
    """Return the function that a LoRA run quantized its frozen weights with, if it did."""
    source = read_run(run)["settings"].get("init_from")
    if lora.base is not None:
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        return rounded_base(config, lora.base, {"inputs": tokens})
    if source is not None and is_quantized_folder(Path(source).expanduser()):
        return saved_base(source)
    return None


def _placed(stored: PyTree, dense: PyTree) -> PyTree:
    """Return the shapes of stored parameters with the shardings of their dense arrays."""
    shardings = stored_shardings(stored, jax.tree.map(lambda leaf: leaf.sharding, dense))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        stored,
        shardings,
    )


def first_params(source: str | None, work: Workload, mesh: AnyMesh) -> PyTree | None:
    """Return the weights at `source`, as training begins with them; None without a source.

    Weights of a Hugging Face folder go to their devices one parameter at a time, dequantized if
    they are quantized. Weights that `tpukit quantize` wrote stay quantized for LoRA, and are
    dequantized where all of them are trained.

    Raises:
        TPUModelError: The weights are of another model.
        TPUValidationError: There is no model at `source`.
    """
    if source is None:
        return None
    config = work.config
    if config is None:
        raise TPUModelError(
            f"init_from='{source}' works for reference transformers only; for your own model, let "
            "its builder return the model with these weights in it."
        )
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        _check_shapes(source, config_from_huggingface(read_json(folder / "config.json")), config)
        params = import_huggingface(
            folder, dtype=jnp.dtype(config.param_dtype), shardings=work.layout(mesh).shardings
        ).params
        return params if work.frozen is None else jax.jit(work.frozen)(params)
    trained = load_trained(source)
    _check_shapes(source, trained.config, config)
    if is_quantized_folder(folder) and work.lora is not None:
        return trained.params  # quantized: only the LoRA matrices are trained
    wide = dense_parameters(trained.params)
    params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), wide, work.base_shapes)
    return params if work.frozen is None else jax.jit(work.frozen)(params)


def _check_shapes(source: str, theirs: TransformerConfig, ours: TransformerConfig) -> None:
    given, expected = theirs.parameter_shapes(), ours.parameter_shapes()
    for path in {**expected, **given}:
        if given.get(path) != expected.get(path):
            raise TPUModelError(
                f"init_from='{source}' has {path} {given.get(path, 'not at all')}, but the job's "
                f"model has {expected.get(path, 'not at all')}; name that folder as the model too."
            )
