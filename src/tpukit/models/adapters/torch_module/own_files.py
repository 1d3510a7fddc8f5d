"""A trained module as torch loads it: a state_dict, or the folder of a Hugging Face model."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....frameworks import is_instance_of
from ..own_files import WEIGHTS_FILE, TrainedArrays, plain_array, save_tensors
from .arrays import tensor_of_host
from .state import ModuleState, path_of


def describe_module(model: Any) -> dict[str, Any]:
    """Record the names of a module's state_dict, and the configuration of a Hugging Face model."""
    import torch

    module: Any = model if isinstance(model, torch.nn.Module) else model.module
    aliases = ModuleState.of(module).aliases
    names = {
        name: aliases.get(path_of(name), path_of(name))
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)  # the extra state of a module may be anything
    }
    record: dict[str, Any] = {"state_dict": names}
    if not is_instance_of(module, "transformers", "PreTrainedModel"):
        return record
    config = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    record["huggingface"] = {
        "module": type(module).__module__,
        "class": type(module).__qualname__,
        "config": _plain(config),
    }
    if module.can_generate():
        record["huggingface"]["generation"] = _plain(module.generation_config.to_diff_dict())
    return record


def write_module(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    """Write a Hugging Face model as its folder, and any other module as its state_dict."""
    whole = {**arrays.params, **arrays.model_state}
    tensors = {name: plain_array(whole[path]) for name, path in record["state_dict"].items()}
    about = record.get("huggingface")
    if about is None:
        save_tensors(tensors, folder)
        return (
            "from safetensors.torch import load_file\n\n"
            f'model.load_state_dict(load_file(folder + "/{WEIGHTS_FILE}"))'
        )
    if about["module"].partition(".")[0] == "transformers":
        _save_pretrained(about, tensors, folder)
        where = "transformers"
    else:  # a subclass in the user's code
        _write_json(folder / "config.json", about["config"])
        save_tensors(tensors, folder)
        where = about["module"]
    if "generation" in about:  # transformers itself refuses to write some that it reads
        _write_json(folder / "generation_config.json", about["generation"])
    name = about["class"]
    return f"from {where} import {name}\n\nmodel = {name}.from_pretrained(folder)"


def _save_pretrained(about: Mapping[str, Any], tensors: Mapping[str, Any], folder: Path) -> None:
    """Let transformers write its own folder: names, shards and ties are its business."""
    import torch

    kind = getattr(importlib.import_module(about["module"]), about["class"])
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(about["config"]))
    values = {name: tensor_of_host(array) for name, array in tensors.items()}
    model.load_state_dict(values, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def _plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON holds it; formats of torch are their names there."""
    return json.loads(json.dumps(entries, default=lambda one: str(one).removeprefix("torch.")))


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n")
