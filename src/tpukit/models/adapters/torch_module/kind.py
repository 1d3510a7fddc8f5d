"""PyTorch modules in the registry of model kinds."""

from typing import Any

from ....frameworks import is_instance_of
from ...remat.policy import RematPolicy
from ..kind import ModelKind
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


TORCH = ModelKind(
    name="PyTorch",
    accepts="a PyTorch module",
    recognises=_recognises,
    build=_build,
    checkpoint=_checkpoint,
)
