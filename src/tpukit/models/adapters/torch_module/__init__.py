"""PyTorch modules as pure jax functions, through torchax; torch is imported on first use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....frameworks import is_instance_of
from ...remat.policy import RematPolicy
from ..kind import ModelKind, TrainedArrays
from ..protocol import ModelAdapter, ModelInputs


def _recognises(model: object) -> bool:
    return is_instance_of(model, "torch.nn") or type(model).__name__ == "TorchModel"


def _build(model: Any, inputs: ModelInputs) -> ModelAdapter:
    from .adapter import TorchAdapter, TorchModel

    whole = model if isinstance(model, TorchModel) else TorchModel(model)
    return TorchAdapter(whole, inputs)


def _checkpoint(model: Any, remat: RematPolicy) -> Any:
    from .adapter import checkpoint_torch

    return checkpoint_torch(model, remat)


def _describe(model: Any) -> dict[str, Any]:
    from .state import describe_module

    return describe_module(model)


def _write(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    from .state import write_module

    return write_module(record, arrays, folder)


TORCH = ModelKind(
    name="PyTorch",
    accepts="a PyTorch module",
    recognises=_recognises,
    build=_build,
    checkpoint=_checkpoint,
    describe=_describe,
    write=_write,
)
