"""The model a job names, and the sources that decide which program the job becomes.

A model is a preset, a Hugging Face config.json, or what somebody's own builder returns.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TPUModelError, TPUValidationError, did_you_mean
from ..plain_data import read_json
from ..runtime.versions import installed_versions
from .torch_source import PREFIX, build_torch_model, is_torch_source

# The source of this package that decides which program a job becomes.
_ROOMS_OF_PROGRAMS = ("kernels", "models", "parallel", "step", "quantization", "job")
_OTHER_FILES = (
    "compiler/program/lowered.py",
    "runtime/device_grid.py",
    "hardware/target.py",
)
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")


def is_own_model(name: str) -> bool:
    """Whether a name is "module:function" or "file.py:function"."""
    return ":" in name


def is_huggingface(name: str) -> bool:
    """Whether a name is a config.json, or a folder with one, or of `tpukit quantize`.

    A preset's name goes first.
    """
    if name.endswith(".json") or "/" in name:
        return True
    files = ("config.json", "quantized.json")
    if not any(os.path.isfile(os.path.join(name, file)) for file in files):
        return False
    from ..models.presets import list_presets

    return name not in list_presets()


def load_model(name: str, changes: Mapping[str, Any], *, values: bool = True) -> Any:
    """What `Workload` takes as its model, or the `Workload` that a builder returned.

    Args:
        name: A preset, a Hugging Face config.json, "module:function", "torch:module:function".
        changes: Fields of the preset to change.
        values: Whether a PyTorch model needs its values; for a check its shapes are enough.

    Raises:
        TPUValidationError: Nothing goes by that name.
        TPUModelError: The file describes no model that is known.
        ConfigError: Changes were given to a model that is not a reference transformer.
    """
    if is_own_model(name):
        if changes:
            raise ConfigError(
                f"'{name}' builds its own model, so {', '.join(changes)} cannot be changed here; "
                "give the builder other defaults."
            )
        from ..compiler.program.entry import errors_of, is_builder, load_object

        where = name.removeprefix(PREFIX) if is_torch_source(name) else name
        build = load_object(where)
        if not is_builder(build):  # a Workload, a module: the model itself
            return build
        _refuse_arguments(where, build)
        with errors_of(where):
            if is_torch_source(name):
                return build_torch_model(where, build, values=values)
            return build()
    if is_huggingface(name):
        import dataclasses

        from ..models.huggingface.config import config_from_huggingface
        from ..quantization.files.model_files import is_quantized_folder, quantized_config

        if is_quantized_folder(Path(name)):
            config = quantized_config(Path(name))
            if config is None:
                raise TPUModelError(
                    f"{name} holds a quantized model of one's own; name its builder."
                )
        else:
            config = config_from_huggingface(_read_config(name))
        return dataclasses.replace(config, **changes)
    refuse_unknown_model(name)
    from ..models.presets import get_preset

    return get_preset(name, **changes)


def model_fingerprint(name: str) -> str | None:
    """A hash of the file that defines a model which this package does not; None for a preset."""
    if is_own_model(name):
        import importlib.util

        if is_torch_source(name):  # what it is made of comes from these as well
            versions = installed_versions("torch", "torchax", "transformers")
            return f"{model_fingerprint(name.removeprefix(PREFIX))} {versions}"
        module = name.rpartition(":")[0]
        spec = None if module.endswith(".py") else importlib.util.find_spec(module)
        path = Path(module) if spec is None else Path(spec.origin or "")
    elif is_huggingface(name):
        path = _config_path(name)
    else:
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def base_fingerprint(source: str | None) -> str | None:
    """A hash of the formats of a quantized folder that training begins with; None for others."""
    file = None if source is None else Path(source).expanduser() / "quantized.json"
    if file is None or not file.is_file():
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()


def source_fingerprint() -> str:
    """A hash of the source that decides which program a plan becomes."""
    root = Path(__file__).parents[1]
    files = [root / name for name in _OTHER_FILES]
    for room in _ROOMS_OF_PROGRAMS:
        for kind in ("*.py", "*.toml", "*.json"):
            files += (root / room).rglob(kind)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """The installed version of each package a program depends on."""
    return installed_versions(*_PACKAGES)


def refuse_unknown_model(name: str) -> None:
    """Raise, with the nearest names, when `name` is neither a preset nor anything else."""
    from ..models.presets import list_presets

    if not is_own_model(name) and not is_huggingface(name) and name not in list_presets():
        raise TPUValidationError(
            f"'{name}' is no preset, no config.json or folder with one, no folder of `tpukit "
            "quantize`, no .yaml file and no file.py:build." + did_you_mean(name, list_presets())
        )


def _refuse_arguments(name: str, build: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called as it is, such as a step."""
    from ..compiler.program.entry import needed_arguments

    needed = needed_arguments(build)
    if needed:
        raise ConfigError(
            f"'{name}' takes {', '.join(needed)}, and what builds a job's model takes nothing; to "
            "check a function itself, give its arguments: --arg 'bf16[8,128]'."
        )


def _config_path(name: str) -> Path:
    path = Path(name)
    if path.suffix == ".json":
        return path
    quantized = path / "quantized.json"
    return quantized if quantized.is_file() else path / "config.json"


def _read_config(name: str) -> dict[str, Any]:
    path = _config_path(name)
    try:
        data = read_json(path)
    except OSError as error:
        raise TPUModelError(
            f"{path} cannot be read ({error.strerror}); name a Hugging Face config.json, the "
            "folder that holds it, or a preset."
        ) from error
    except ValueError as error:
        raise TPUModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise TPUModelError(
            f"{path} is JSON, but no configuration of a Hugging Face model, which is an object "
            "with a model_type; name a config.json, the folder that holds it, a preset, or "
            "file.py:build."
        )
    return data  # pyright: ignore[reportUnknownVariableType]  checked key by key by its reader
