"""The number format a run is asked to compute in, put into its model."""

from typing import Any, Literal

from ..errors import TPUModelError
from ..models.presets import get_preset
from ..models.products.matmul_format import check_matmul
from ..models.transformer.config import TransformerConfig
from ..step.workload import Workload

Precision = Literal["bfloat16", "float32", "float8", "int8"]
# Eight bits are for the operands of products alone: what activations are in beside them.
ACTIVATIONS: dict[str, str] = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float8": "bfloat16",
    "int8": "bfloat16",
}
NARROW = ("float8", "int8")


def in_precision(model: Any, precision: Precision) -> tuple[Any, str | None]:
    """The model computing in `precision`, and what there is to say about it here.

    Somebody's own model is returned as it is: it is cast from outside.

    Raises:
        TPUModelError: Eight bits for a model of one's own, or for a chip that has none.
    """
    matmul = precision if precision in NARROW else "dtype"
    note = check_matmul(matmul)
    if isinstance(model, str):
        model = get_preset(model)
    if isinstance(model, Workload):
        inner, _ = in_precision(model.model, precision)
        return model.replace(model=inner), note
    if isinstance(model, TransformerConfig):
        return model.replace(dtype=ACTIVATIONS[precision], matmul=matmul), note
    if precision in NARROW:
        raise TPUModelError(
            f"precision {precision} is for the reference transformers, and this is "
            f"{type(model).__name__}; call tpukit.models.{precision}.{precision}_matmul in your "
            "own model."
        )
    return model, note
