"""A trained model: loaded from a run, its checkpoints, a Hugging Face folder or a quantized one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError
from ..models.generation.programs import DecodingPrograms
from ..models.huggingface.files import read_json
from ..models.huggingface.generation_config import read_generation_config
from ..models.huggingface.weights import import_huggingface
from ..models.lora.adapter import with_low_rank
from ..models.lora.peft_files import CONFIG_FILE as ADAPTER_CONFIG
from ..models.lora.peft_files import read_peft
from ..models.stored.placement import place_stored
from ..models.stored.running import dense_parameters
from ..models.transformer.config import TransformerConfig
from ..quantization.files.model_files import is_quantized_folder, load_quantized
from ..runtime.run_files import IDENTITY_FILE
from .data.tokenizer_files import BYTES, TOKENIZER
from .saved_run import existing_path, find_run, read_saved, restore_saved


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A reference transformer and its parameters.

    Attributes:
        config: What it is.
        params: Its parameters, on the first device or the host; or split over a mesh.
        source: Where they came from.
        step: After how many steps; None where nobody wrote it down.
        tokenizer: What its text was made into tokens with, or None where that is not known.
        generation: Entries of its `generation_config.json`, end tokens among them.
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
    found = restore_saved(run, step, mesh)
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
        generation=read_generation_config(run),
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
        tokenizer=BYTES if found.tokenizer == BYTES else _kept_tokenizer(folder) or found.tokenizer,
        generation=read_generation_config(folder),
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
    about = read_json(folder / "config.json")
    wide = "float32" in (about.get("dtype"), about.get("torch_dtype"))
    return TrainedModel(
        config=found.config.replace(dtype="float32") if wide else found.config,
        params=found.params,
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
            f"{folder} holds adapters beside '{base}', which is no folder here; write that model's "
            f"folder as base_model_name_or_path in its {ADAPTER_CONFIG}."
        )
    model = load_trained(base, step=step, mesh=mesh)
    adapter = read_peft(folder, model.config)
    wide = dense_parameters(jax.tree.map(jnp.asarray, model.params))
    params = with_low_rank(wide, adapter.params, adapter.spec)
    return replace(model, params=params, source=f"{folder} beside {base}")
