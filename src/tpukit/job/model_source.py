"""Load the model that a job names, and hash the files that decide its compiled program.

A model is a preset, a Hugging Face config.json, or the result of a user's builder. A builder named
`torch:module:function` returns an `nn.Module`; torch's meta device builds it without memory where
shapes are enough.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TPUModelError, TPUValidationError, did_you_mean
from ..plain_data import read_json
from ..runtime.versions import installed_versions

# Source of this package that decides the compiled program.
_ROOMS_OF_PROGRAMS = (
    *("kernels", "models", "parallel", "step", "quantization", "job"),
    "hardware/data/chips",  # which blocks kernels choose
)
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
    """Whether a name is a config.json, a folder with one, or a folder of `tpukit quantize`.

    A preset of the same name takes precedence over a folder.
    """
    if name.endswith(".json") or "/" in name:
        return True
    files = ("config.json", "quantized.json")
    if not any(os.path.isfile(os.path.join(name, file)) for file in files):
        return False
    from ..models.presets import list_presets

    return name not in list_presets()


def load_model(name: str, changes: Mapping[str, Any], *, values: bool = True) -> Any:
    """Return the model of that name, or the `Workload` that its builder returned.

    Args:
        name: A preset, a Hugging Face config.json, "module:function" or "torch:module:function".
        changes: Fields of the preset to change.
        values: Whether a PyTorch model needs its values; for a check its shapes are enough.

    Raises:
        TPUValidationError: There is no model of that name.
        TPUModelError: The file describes no supported model.
        ConfigError: Changes were given for a model that is not a reference transformer.
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
                    f"{name} contains a quantized model that is not a reference transformer; name "
                    "its builder instead: file.py:build."
                )
        else:
            config = config_from_huggingface(_read_config(name))
        return dataclasses.replace(config, **changes)
    refuse_unknown_model(name)
    from ..models.presets import get_preset

    return get_preset(name, **changes)


@dataclass(eq=False)
class ModelSource:
    """The model of a job, loaded when it is first needed and then kept.

    Attributes:
        model: As `Job.model`.
        changes: As `Job.model_changes`.
    """

    model: Any
    changes: Mapping[str, Any]
    _loaded: Any = field(default=None, init=False)
    _has_values: bool = field(default=False, init=False)

    def load(self, *, values: bool) -> Any:
        """Return the model; it is loaded again only where values are missing that are needed."""
        if not isinstance(self.model, str):
            return self.model
        values = values or not is_torch_source(self.model)
        if self._loaded is None or (values and not self._has_values):
            self._loaded = load_model(self.model, self.changes, values=values)
            self._has_values = values
        return self._loaded

    def is_same(self, other: "ModelSource") -> bool:
        """Whether both lead to one model; two models made in Python are never the same."""
        same_name = isinstance(self.model, str) and self.model == other.model
        return (self.model is other.model or same_name) and self.changes == other.changes


def model_fingerprint(name: str) -> str | None:
    """Return a hash of the file that defines a user's model; None for a preset."""
    if is_own_model(name):
        import importlib.util

        if is_torch_source(name):  # the program depends on these packages too
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
    """Return a hash of the quantized folder that training starts from; None for other sources."""
    file = None if source is None else Path(source).expanduser() / "quantized.json"
    if file is None or not file.is_file():
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def source_fingerprint() -> str:
    """Return a hash of this package's source that decides the compiled program."""
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
    """Return the installed version of each package that the compiled program depends on."""
    return installed_versions(*_PACKAGES)


def refuse_unknown_model(name: str) -> None:
    """Raise if `name` names no model; the error suggests the nearest preset.

    Raises:
        TPUValidationError: There is no such preset, file or builder.
    """
    from ..models.presets import list_presets

    if not is_own_model(name) and not is_huggingface(name) and name not in list_presets():
        raise TPUValidationError(
            f"'{name}' is not a model; expected a preset, a job .yaml, a config.json or a folder "
            "with one, a folder of `tpukit quantize`, or file.py:build."
            + did_you_mean(name, list_presets())
        )


def _refuse_arguments(name: str, build: Callable[..., Any]) -> None:
    """Raise if a builder needs arguments; it may be a training step instead."""
    from ..compiler.program.entry import needed_arguments

    needed = needed_arguments(build)
    if needed:
        raise ConfigError(
            f"'{name}' takes {', '.join(needed)}, but a model builder takes no arguments; to "
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
            "folder that contains it, or a preset."
        ) from error
    except ValueError as error:
        raise TPUModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise TPUModelError(
            f"{path} is not a Hugging Face config: expected an object with a model_type; name a "
            "config.json, the folder that contains it, a preset, or file.py:build."
        )
    return data  # pyright: ignore[reportUnknownVariableType]  checked key by key by its reader


logger = logging.getLogger(__name__)

PREFIX = "torch:"
MEAN_LOSS = (
    "the builder returns inputs but no loss, so the loss is the mean of the model's first output; "
    "return 'labels' or 'targets' with the inputs, or a Workload with loss=…"
)


def is_torch_source(name: str) -> bool:
    """Whether a name is "torch:module:function"; "torch:f" is a function of torch itself."""
    return name.startswith(PREFIX) and ":" in name.removeprefix(PREFIX)


def build_torch_model(name: str, build: Callable[[], object], *, values: bool) -> Any:
    """Call a builder, and return its module, or a `Workload` if it also returned sample inputs.

    Args:
        name: Name of the builder, for errors.
        build: Returns a module, a pair of module and sample inputs, or a `Workload`.
        values: Whether the model needs its values; without them it is built on the meta device.

    Raises:
        TPUModelError: The builder returned another type.
    """
    made = build() if values else _on_meta(name, build)
    if _is_module(made) or _is_module_workload(made):
        return made
    if isinstance(made, tuple) and len(made) == 2 and _is_module(made[0]):  # pyright: ignore[reportUnknownArgumentType]  anything
        module, inputs = made  # pyright: ignore[reportUnknownVariableType]
        return _workload(name, module, inputs)
    raise TPUModelError(
        f"'{name}' returned {_kind(made)}; --torch takes a function that returns an nn.Module, "
        "a pair (module, sample_inputs), or a Workload of one."
    )


def mean_of_first_output(outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Return the mean of a model's first output, a loss for models without one."""
    import jax
    import jax.numpy as jnp

    del batch
    first = next(
        leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.inexact)
    )
    return jnp.mean(first.astype(jnp.float32))


def _on_meta(name: str, build: Callable[[], object]) -> object:
    """Build on the meta device; if the builder fails there, build with values."""
    from ..models.adapters.torch_module.environment import require_torch

    torch = require_torch(f"--torch {name}")
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # noqa: BLE001  a builder that is wrong fails again below
        text = " ".join(str(error).split())
        logger.info("%s needs values to be built (%s: %s)", name, type(error).__name__, text)
        return build()


def _workload(name: str, module: Any, inputs: Any) -> Any:
    """Return the `Workload` of a module whose batches have the shapes of its sample inputs."""
    import inspect

    from ..models.adapters.torch_module.arrays import shape_of
    from ..step.workload import Workload

    if isinstance(inputs, Mapping):
        tensors: dict[str, Any] = dict(inputs)  # pyright: ignore[reportUnknownArgumentType]  anything
    else:
        given: list[Any] = list(inputs) if isinstance(inputs, tuple | list) else [inputs]  # pyright: ignore[reportUnknownArgumentType]  anything
        names = list(inspect.signature(module.forward).parameters)
        tensors = {
            names[number] if number < len(names) else f"input_{number}": tensor
            for number, tensor in enumerate(given)
        }
    for key, tensor in tensors.items():
        if not hasattr(tensor, "dtype") or not getattr(tensor, "ndim", 0):
            raise TPUModelError(
                f"'{name}' returns {_kind(tensor)} as input {key!r}; return a tensor whose first "
                "dimension is the batch, or a tuple or dictionary of such tensors."
            )
    batch = {key: shape_of(tensor) for key, tensor in tensors.items()}
    called_with = tuple(key for key in batch if key != "targets") or tuple(batch)
    has_loss = bool({"targets", "labels"} & batch.keys())
    length = _length(tensors)
    return Workload(
        module,
        batch=batch,
        inputs=called_with,
        loss=None if has_loss else mean_of_first_output,
        sequence_length=length,
    )


def _length(tensors: Mapping[str, Any]) -> int | None:
    """Return the tokens per example if the first input is (batch, tokens) of integers."""
    first = next(iter(tensors.values()))
    is_tokens = first.ndim == 2 and not first.dtype.is_floating_point
    return int(first.shape[1]) if is_tokens else None


def _is_module(made: object) -> bool:
    from ..frameworks import is_instance_of

    return is_instance_of(made, "torch.nn")


def _is_module_workload(made: object) -> bool:
    inner = getattr(made, "model", None)
    return hasattr(made, "jit_train_step") and (
        _is_module(inner) or type(inner).__name__ == "TorchModel"
    )


def _kind(made: object) -> str:
    if made is None:
        return "None"
    name = type(made).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
