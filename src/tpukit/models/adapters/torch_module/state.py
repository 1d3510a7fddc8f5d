"""The tensors of a PyTorch module, and the files that torch or transformers load them from."""

import importlib
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ....frameworks import is_instance_of
from ....plain_data import JsonMapping
from ..kind import WEIGHTS_FILE, TrainedArrays, plain_array, save_tensors
from .arrays import shape_of, tensor_of_host, to_tensor


@dataclass(frozen=True)
class ModuleState:
    """The tensors of a module by path; shared (tied) tensors are listed once.

    Attributes:
        trained: Parameters that require a gradient.
        carried: Frozen parameters, buffers, and tensors in plain attributes.
        aliases: Other paths of listed tensors: alias -> path.
    """

    trained: dict[str, Any]
    carried: dict[str, Any]
    aliases: dict[str, str]

    @classmethod
    def of(cls, module: Any) -> "ModuleState":
        """Return the state of a module."""
        trained: dict[str, Any] = {}
        carried: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        first_name: dict[int, str] = {}
        for dotted, tensor in _every_tensor(module):
            name = path_of(dotted)
            if id(tensor) in first_name:
                if first_name[id(tensor)] != name:
                    aliases[name] = first_name[id(tensor)]
                continue
            first_name[id(tensor)] = name
            (trained if tensor.requires_grad else carried)[name] = tensor
        return cls(trained, carried, aliases)

    @property
    def has_values(self) -> bool:
        """Whether all tensors have values, unlike those on torch's meta device."""
        every = (*self.trained.values(), *self.carried.values())
        return not any(tensor.is_meta for tensor in every)

    def narrowed(self) -> list[str]:
        """Return the names of float64 tensors, which become float32."""
        every = {**self.trained, **self.carried}
        return [name for name, one in every.items() if str(one.dtype) == "torch.float64"]

    def shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return shapes and dtypes of trained and of carried tensors."""
        return (
            {name: shape_of(tensor) for name, tensor in self.trained.items()},
            {name: shape_of(tensor) for name, tensor in self.carried.items()},
        )

    def write(self, params: Mapping[str, jax.Array], carried: Mapping[str, jax.Array]) -> None:
        """Write values into the module's tensors, except frozen parameters."""
        import torch

        with torch.no_grad():
            for path, array in params.items():
                self.trained[path].copy_(to_tensor(array))
            for path, array in carried.items():
                if not isinstance(self.carried[path], torch.nn.Parameter):
                    self.carried[path].copy_(to_tensor(array))

    def whole(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under all of their paths."""
        shared = {alias: tensors[name] for alias, name in self.aliases.items() if name in tensors}
        return {**tensors, **shared}


@contextmanager
def attributes_restored(module: Any) -> Generator[None]:
    """Restore the attributes of a module and its children at the end of the context.

    A forward may store tensors on the module (`self.last = x`; an LSTM keeps a list of its
    weights). In a trace these are tracers, which must not outlive the trace.
    """
    kept = [
        (inner, dict(vars(inner)), [(one, list(one)) for one in _lists(inner)])
        for inner in module.modules()
    ]
    try:
        yield
    finally:
        for inner, attributes, lists in kept:
            vars(inner).clear()
            vars(inner).update(attributes)
            for one, members in lists:
                one[:] = members


def _lists(module: Any) -> list[list[Any]]:
    return [one for one in vars(module).values() if isinstance(one, list)]  # pyright: ignore[reportUnknownVariableType]  anything


def path_of(name: str) -> str:
    """Return the path of a tensor's name, with "/" in place of torch's "."."""
    return name.replace(".", "/")


def _every_tensor(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield all tensors of a module and its children, shared ones under every name."""
    import torch

    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}" if prefix else name, value


def describe_module(model: Any) -> dict[str, Any]:
    """Return the names of a module's state_dict, and the configuration of a Hugging Face model."""
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
    """Write a Hugging Face model as a folder, and any other module as a state_dict."""
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
    if "generation" in about:  # transformers does not write some files that it reads
        _write_json(folder / "generation_config.json", about["generation"])
    name = about["class"]
    return f"from {where} import {name}\n\nmodel = {name}.from_pretrained(folder)"


def _save_pretrained(about: JsonMapping, tensors: Mapping[str, Any], folder: Path) -> None:
    """Let transformers write its own folder, with its names, shards and tied weights."""
    import torch

    kind = getattr(importlib.import_module(about["module"]), about["class"])
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(about["config"]))
    values = {name: tensor_of_host(array) for name, array in tensors.items()}
    model.load_state_dict(values, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def _plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain JSON data; torch dtypes become their names."""
    return json.loads(json.dumps(entries, default=lambda one: str(one).removeprefix("torch.")))


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n")
