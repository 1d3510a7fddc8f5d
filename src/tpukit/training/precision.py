"""The number format a run is asked to compute in, put into its model."""

from typing import Any, Literal

from ..errors import TPUModelError
from ..models.float8 import check_float8
from ..models.presets import get_preset
from ..models.transformer_config import TransformerConfig
from ..models.workload import Workload

Precision = Literal["bfloat16", "float32", "float8"]
# What activations are in; float8 is for the operands of products alone.
ACTIVATIONS: dict[str, str] = {"bfloat16": "bfloat16", "float32": "float32", "float8": "bfloat16"}


def in_precision(model: Any, precision: Precision) -> tuple[Any, str | None]:
    """The model computing in `precision`, and what there is to say about it here.

    Somebody's own model is returned as it is: it is cast from outside.

    Raises:
        TPUModelError: float8 for a model of one's own, or for a chip that has none.
    """
    note = check_float8() if precision == "float8" else None
    if isinstance(model, str):
        model = get_preset(model)
    if isinstance(model, Workload):
        inner, _ = in_precision(model.model, precision)
        return model.replace(model=inner), note
    if isinstance(model, TransformerConfig):
        matmul = "float8" if precision == "float8" else "dtype"
        return model.replace(dtype=ACTIVATIONS[precision], matmul=matmul), note
    if precision == "float8":
        raise TPUModelError(
            f"precision float8 is for the reference transformers, and this is "
            f"{type(model).__name__}; call tpukit.models.float8.float8_matmul in your own model."
        )
    return model, note
