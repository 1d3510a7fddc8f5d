"""Modules and optimizers on disk: a safetensors file or an Orbax folder, never a pickle."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TPUCheckpointError
from ..models.adapters.torch_module.arrays import to_array, to_tensor
from ..plain_data import JsonMapping, JsonObject, parse_json, read_json
from ..runtime.files import start_of_tensors, whole_file

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FORMAT = 1
_MODEL, _SLOT = "model.", "optimizer."
_DESCRIPTION = "tpukit.json"  # in a folder; a file has it in its header
_PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".pkl")


def save(
    module: "torch.nn.Module",
    path: str | Path,
    *,
    optimizer: "torch.optim.Optimizer | None" = None,
    metadata: JsonMapping | None = None,
) -> Path:
    """Write the state of a module, and of an optimizer if one is given.

    Args:
        module: Any `nn.Module`; a prepared one is written with its newest values.
        path: A safetensors file; a path without a suffix becomes an Orbax folder.
        optimizer: A torch optimizer.
        metadata: Plain data of the user, stored with it.

    Raises:
        TPUCheckpointError: The path cannot be written.
    """
    place = Path(path)
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in module.state_dict().items()}
    description: JsonObject = {
        "format": FORMAT,
        "model": type(module).__name__,
        "metadata": dict(metadata or {}),
    }
    if optimizer is not None:
        slots, groups = _optimizer_parts(optimizer)
        tensors |= slots
        description["optimizer"] = {"class": type(optimizer).__name__, "groups": groups}
    try:
        text = json.dumps(description)
    except TypeError as error:
        raise TPUCheckpointError(
            f"metadata is not plain data ({error}); pass numbers, text, lists and dicts."
        ) from None
    if place.suffix in _PICKLE_SUFFIXES:
        logger.warning("%s is written as safetensors, not as a pickle, under that name", place.name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix:
            _write_file(place, tensors, text)
        else:
            _write_folder(place, tensors, text)
    except OSError as error:
        raise TPUCheckpointError(
            f"{place} cannot be written ({error.strerror}); choose another path."
        ) from None
    logger.info("save model=%s tensors=%d path=%s", description["model"], len(tensors), place)
    return place


def load(
    module: "torch.nn.Module", path: str | Path, *, optimizer: "torch.optim.Optimizer | None" = None
) -> dict[str, Any]:
    """Read a file of `save` into a module, and into an optimizer if one is given.

    Returns:
        The user's metadata.

    Raises:
        TPUCheckpointError: The file is missing, a pickle, of another model, or has no optimizer
            although one is given. The module is not changed then.
    """
    place = Path(path)
    if place.is_dir():
        tensors, description = _read_folder(place)
    else:
        tensors, description = _read_file(place)
    own = {
        name.removeprefix(_MODEL): tensor
        for name, tensor in tensors.items()
        if name.startswith(_MODEL)
    }
    _check(module, own, place)
    if optimizer is not None:
        state = _optimizer_state(tensors, description, place)
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError) as error:
            raise TPUCheckpointError(
                f"{place} has the state of another optimizer ({error}); create the optimizer with "
                "the same parameter groups."
            ) from None
    module.load_state_dict(own)
    logger.info("load model=%s tensors=%d path=%s", type(module).__name__, len(own), place)
    return description["metadata"]


def _optimizer_parts(
    optimizer: "torch.optim.Optimizer",
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an optimizer's tensors by name, and its groups as plain data."""
    import torch

    state = optimizer.state_dict()
    slots: dict[str, Any] = {}
    for index, own in state["state"].items():
        for slot, value in own.items():
            if value is not None:
                slots[f"{_SLOT}{index}.{slot}"] = torch.as_tensor(value)
    groups = [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in g.items()
        }
        for g in state["param_groups"]
    ]
    return slots, groups


def _optimizer_state(
    tensors: "Mapping[str, torch.Tensor]", description: JsonMapping, place: Path
) -> dict[str, Any]:
    if "optimizer" not in description:
        raise TPUCheckpointError(
            f"{place} has no optimizer; load it with load_optimizer=False, or save with "
            "save_optimizer=True, optimizer=optimizer."
        )
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith(_SLOT):
            index, slot = name.removeprefix(_SLOT).split(".", 1)
            state.setdefault(int(index), {})[slot] = tensor
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}  # pyright: ignore[reportUnknownArgumentType]  plain data
        for group in description["optimizer"]["groups"]
    ]
    return {"state": state, "param_groups": groups}


def _check(module: "torch.nn.Module", tensors: "Mapping[str, torch.Tensor]", place: Path) -> None:
    """Refuse tensors of another module, before any change."""
    wanted = module.state_dict()
    missing, unknown = [*(wanted.keys() - tensors)], [*(tensors.keys() - wanted)]
    for verb, names in (("lacks", missing), ("has", unknown)):
        if names:
            some = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
            raise TPUCheckpointError(
                f"{place} {verb} {some}, unlike this {type(module).__name__}; build the model "
                "with the settings it was saved with."
            )
    for name, tensor in wanted.items():
        if tuple(tensor.shape) != tuple(tensors[name].shape):
            raise TPUCheckpointError(
                f"{place} has {name} as {list(tensors[name].shape)}, but this model has "
                f"{list(tensor.shape)}; build the model with the settings it was saved with."
            )


def _write_file(place: Path, tensors: "Mapping[str, torch.Tensor]", text: str) -> None:
    from safetensors.torch import save as serialise

    # safetensors refuses tensors that share memory, as tied weights do.
    copies = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    with whole_file(place, durable=True) as file:
        file.write(serialise(copies, {"tpukit": text}))


def _read_file(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    start_of_tensors(
        place,
        instead="Convert it where you trust it: "
        "safetensors.torch.save_file(torch.load(path, weights_only=True), …).",
    )
    try:
        with safe_open(place, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a dict
            header = (opened.metadata() or {}).get("tpukit")
    except SafetensorError as error:
        raise TPUCheckpointError(
            f"{place} is not a safetensors file ({error}); copy it again."
        ) from None
    if header is None:  # plain weights of another program
        plain = {f"{_MODEL}{name}": one for name, one in tensors.items()}
        return plain, {"metadata": {}}
    return tensors, parse_json(header)


def _write_folder(place: Path, tensors: "Mapping[str, torch.Tensor]", text: str) -> None:
    from etils import epath

    from ..training.checkpoint.named_arrays import arrays_of, describe_tree
    from ..training.checkpoint.orbax_arrays import OrbaxArrays

    arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
    shapes = [one.to_dict() for one in describe_tree(arrays, item="arrays")]
    writer = OrbaxArrays()
    try:
        writer.start_save(epath.Path(place), {"arrays": arrays_of(arrays, item="arrays")})
        writer.wait()
    finally:
        writer.close()
    formats = {name: str(one.dtype).removeprefix("torch.") for name, one in tensors.items()}
    (place / _DESCRIPTION).write_text(
        json.dumps({"description": json.loads(text), "shapes": shapes, "formats": formats})
    )


def _read_folder(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import jax.numpy as jnp
    import torch
    from etils import epath

    from ..training.checkpoint.named_arrays import LeafShape
    from ..training.checkpoint.orbax_arrays import OrbaxArrays

    try:
        document = read_json(place / _DESCRIPTION)
    except (OSError, ValueError) as error:
        raise TPUCheckpointError(
            f"{place} is not a folder of save_model: its {_DESCRIPTION} cannot be read ({error}). "
            "Give the folder that save_model returned."
        ) from None
    shapes = [LeafShape.from_dict(shape) for shape in document["shapes"]]
    reader = OrbaxArrays()
    try:
        arrays = reader.load(epath.Path(place), {"arrays": shapes}, {"arrays": {}})["arrays"]
    finally:
        reader.close()
    tensors = {
        name: to_tensor(jnp.asarray(one), dtype=getattr(torch, document["formats"][name]))
        for name, one in arrays.items()
    }
    return tensors, document["description"]
