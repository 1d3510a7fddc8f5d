"""What a run left of its model: where it is, what it is, and its parameters, thin ones too."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError, did_you_mean
from ..models.adapters import TransformerAdapter
from ..models.generation.programs import DecodingPrograms
from ..models.lora.adapter import LoraAdapter
from ..models.lora.spec import LoraSpec
from ..models.stored.placement import stored_shardings
from ..models.transformer.config import TransformerConfig
from ..parallel.mesh.mesh import create_mesh
from ..quantization.files.model_files import is_quantized_folder
from ..quantization.frozen import rounded_base, saved_base
from ..runtime.run_files import IDENTITY_FILE
from .checkpoint import Checkpoint, TPUCheckpointer
from .data.tokenizer_files import BYTES, TOKENIZER
from .run_directory import read_run


def existing_path(source: str | Path) -> Path:
    """Where a model is said to be.

    Raises:
        TPUValidationError: Nothing is there.
    """
    path = Path(source).expanduser()
    if not os.path.exists(path):  # Path.exists() minds a name that is too long
        siblings = [entry.name for entry in path.parent.glob("*")]
        raise TPUValidationError(
            f"{path} is not there; give a run directory or a Hugging Face folder."
            + did_you_mean(path.name, siblings)
        )
    return path


def find_run(path: Path) -> tuple[Path | None, int | None]:
    """The run that a path belongs to, and the step where it names one."""
    if (path / IDENTITY_FILE).is_file():
        return path, None
    path = path.resolve()
    if (path.parent / IDENTITY_FILE).is_file():
        return path.parent, None
    if path.name.isdigit() and (path.parent.parent / IDENTITY_FILE).is_file():
        return path.parent.parent, int(path.name)
    return None, None


class SavedRun(NamedTuple):
    """What a run trained, where its checkpoints are, its tokenizer, and its thin matrices."""

    config: TransformerConfig
    checkpoints: str | Path
    tokenizer: str | None
    lora: LoraSpec | None


def read_saved(run: Path) -> SavedRun:
    """What a run wrote down of its model.

    Raises:
        TPUModelError: It is a model of the user's own.
    """
    about = read_run(run)
    model, settings = about["identity"]["model"], about["settings"]
    if not isinstance(model, dict):
        raise TPUModelError(
            f"{run} trained a model of its own, '{model}', and only reference transformers can be "
            f"loaded without their code; `tpukit export {run} out/` writes it in the files of its "
            "own framework."
        )
    config = TransformerConfig.from_dict(model)  # pyright: ignore[reportUnknownArgumentType]  JSON
    folder: str | Path = settings.get("checkpoint_dir") or run / "checkpoints"
    thin = about["identity"].get("lora")
    lora = None if thin is None else LoraSpec.from_dict(thin)
    said, kept = settings.get("tokenizer"), run / TOKENIZER
    words = str(kept) if said not in (None, BYTES) and kept.is_file() else said
    return SavedRun(config, folder, words, lora)


def restore_saved(run: Path, step: int | None, mesh: Mesh | None = None) -> Checkpoint:
    """What a run saved of its model: split as `generate` wants it, or on the first device here."""
    config, folder, _, lora = read_saved(run)
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
