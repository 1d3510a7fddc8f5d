"""LoRA adapters in the files of `peft`: adapter_config.json and safetensors."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...annotations import PyTree
from ...errors import TPUModelError
from ...plain_data import JsonMapping
from ..huggingface.config import family_for
from ..huggingface.files import read_json
from ..huggingface.tensors import tensor_entries
from ..transformer.config import TransformerConfig
from .spec import LoraSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options of peft beyond plain LoRA, and their values for plain LoRA.
_PLAIN = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    "modules_to_save": (None, []),
    "bias": ("none", None),
    "layer_replication": (None,),
}


class PeftAdapter(NamedTuple):
    """LoRA matrices by path, their settings, and the folder or name of the base model."""

    params: dict[str, PyTree]
    spec: LoraSpec
    base: str | None


class _Place(NamedTuple):
    """A module of the checkpoint, and the path and row of its matrix in our parameters."""

    module: str
    path: str
    row: tuple[int, ...]


def write_peft(
    params: Mapping[str, Any],
    spec: LoraSpec,
    config: TransformerConfig,
    folder: str | Path,
    *,
    base: str | None = None,
) -> list[Path]:
    """Write LoRA matrices as a folder that `peft.PeftModel.from_pretrained` reads.

    Args:
        params: `a` and `b` under the path of each target matrix.
        spec: The LoRA settings.
        config: The base model.
        folder: Created if it does not exist.
        base: The folder or name of the base model.

    Raises:
        TPUModelError: A matrix is part of a larger tensor in Hugging Face's files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for place in _places(config, set(_paths(params))):
        thin = _find(params, place.path)
        for letter, name in (("a", "lora_A"), ("b", "lora_B")):
            matrix = np.asarray(thin[letter][place.row]).T
            tensors[f"{_PREFIX}{place.module}.{name}.weight"] = np.ascontiguousarray(matrix)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    modules = sorted({name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in tensors})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")
    return [folder / CONFIG_FILE, folder / WEIGHTS_FILE]


def read_peft(folder: str | Path, config: TransformerConfig) -> PeftAdapter:
    """Read LoRA matrices that `peft` (or `write_peft`) wrote.

    Layers without LoRA matrices get matrices of zeros.

    Raises:
        TPUModelError: The files are not plain LoRA, or belong to another model.
    """
    folder = Path(folder)
    about = read_json(folder / CONFIG_FILE)
    rank, alpha = _checked(about, folder)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise TPUModelError(
            f"{folder / WEIGHTS_FILE} cannot be read as safetensors ({error}); pickled adapters "
            "(.bin) are not read."
        ) from None
    named = {name.replace(".default.weight", ".weight"): one for name, one in tensors.items()}
    modules = {name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in named}
    shapes = config.parameter_shapes()
    params: dict[str, PyTree] = {}
    used: set[str] = set()
    for place in _places(config, None):
        if place.module not in modules:
            continue
        thin = _room(params, place.path, shapes[place.path], rank)
        for letter, name in (("a", "lora_A"), ("b", "lora_B")):
            full = f"{_PREFIX}{place.module}.{name}.weight"
            expected = thin[letter][place.row].T.shape
            if full not in named or named[full].shape != expected:
                found = named[full].shape if full in named else "not there"
                raise TPUModelError(
                    f"'{full}' is {found}, but r={rank} and the model need {expected}; the adapter "
                    "belongs to another model, or is incomplete."
                )
            thin[letter][place.row] = named[full].T
            used.add(full)
    if not params or set(named) - used:
        strange = sorted(set(named) - used)[:3]
        raise TPUModelError(
            f"{folder / WEIGHTS_FILE} has {', '.join(strange) or 'no adapters'}, which match no "
            f"matrix of '{config.name}'; the adapter belongs to another model."
        )
    spec = LoraSpec(rank=rank, alpha=alpha, targets=tuple(f"^{path}$" for path in _paths(params)))
    base = about.get("base_model_name_or_path")
    return PeftAdapter(params, spec, str(base) if base else None)


def _checked(about: JsonMapping, folder: Path) -> tuple[int, float]:
    rank, alpha = about.get("r"), about.get("lora_alpha")
    good = type(rank) is int and type(alpha) in (int, float) and 0 < rank < 1 << 16
    if about.get("peft_type") != "LORA" or not good:
        raise TPUModelError(
            f"{folder / CONFIG_FILE} has peft_type={about.get('peft_type')!r}, r={rank!r}, "
            f"lora_alpha={alpha!r}; expected plain LoRA."
        )
    for key, plain in _PLAIN.items():
        if key in about and about[key] not in plain:
            raise TPUModelError(
                f"{folder / CONFIG_FILE} has {key}={about[key]!r}, but only plain LoRA is read; "
                "merge it with peft (merge_and_unload) and read the merged model."
            )
    assert isinstance(rank, int)
    # rsLoRA divides by the square root of the rank instead.
    scaled = float(alpha) * rank**0.5 if about.get("use_rslora") else float(alpha)  # pyright: ignore[reportArgumentType]
    return rank, scaled


def _places(config: TransformerConfig, wanted: set[str] | None) -> Iterator[_Place]:
    """Yield every matrix of the layers that is a module of its own in Hugging Face's files."""
    family = family_for(config)
    tensors_of_layers = family.layer_tensors(config, family.json(config))
    seen: set[str] = set()
    for entry in tensor_entries(config, tensors_of_layers, prefix="model.", head=""):
        if wanted is not None and entry.path not in wanted:
            continue
        seen.add(entry.path)
        module, dot, leaf = entry.name.rpartition(".")
        plain = entry.source.transposed and entry.source.part is None and not entry.source.unit_axis
        if plain and dot and leaf == "weight" and len(entry.shape) == 2:
            yield _Place(module, entry.path, entry.index)
        elif wanted is not None:
            raise TPUModelError(
                f"'{entry.path}' is part of the tensor '{entry.name}' in Hugging Face's files, so "
                "peft cannot have an adapter for it; export the merged model instead."
            )
    if wanted is not None and wanted - seen:
        raise TPUModelError(
            f"{', '.join(sorted(wanted - seen))} are not in Hugging Face's files of this model; "
            "export the merged model instead."
        )


def _room(
    params: dict[str, PyTree], path: str, shape: tuple[int, ...], rank: int
) -> dict[str, np.ndarray]:
    found = _find(params, path)
    if found is not None:
        return found
    *parents, leaf = path.split("/")
    tree = params
    for word in parents:
        tree = tree.setdefault(word, {})
    *stack, inputs, outputs = shape
    tree[leaf] = {
        "a": np.zeros((*stack, inputs, rank), np.float32),
        "b": np.zeros((*stack, rank, outputs), np.float32),
    }
    return tree[leaf]


def _paths(params: Mapping[str, Any], before: str = "") -> list[str]:
    if "a" in params and "b" in params and not isinstance(params["a"], Mapping):
        return [before]
    return [
        path
        for key, below in params.items()
        for path in _paths(below, f"{before}/{key}" if before else key)
    ]


def _find(tree: PyTree, path: str) -> Any:
    for word in path.split("/"):
        if not isinstance(tree, Mapping) or word not in tree:
            return None
        tree = tree[word]
    return tree
