"""The number formats a job is asked to compute and store in, put into its model."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import TPUModelError

Precision = Literal[
    "bfloat16", "float32", "float16", "float8", "float8_static", "float8_channels", "int8"
]
ParamDtype = Literal["bfloat16", "float32", "float16"]
# Eight bits are for the operands of products alone: `TransformerConfig.matmul` has these names.
NARROW = ("float8", "float8_static", "float8_channels", "int8")


@dataclass(frozen=True)
class InPrecision:
    """A model in the formats asked for.

    Attributes:
        model: The model, changed where its own configuration can say it.
        options: Arguments of `Workload` that say it for anybody's own model.
        note: What there is to say about it here.
    """

    model: Any
    options: dict[str, str] = field(default_factory=dict[str, str])
    note: str | None = None


def in_precision(
    model: Any, precision: Precision | None, param_dtype: ParamDtype | None
) -> InPrecision:
    """Put formats into a model; None leaves what the model says itself.

    Raises:
        TPUModelError: Eight bits for a model of one's own, or for a chip that has none.
    """
    from ..models.products.matmul_format import check_matmul
    from ..models.transformer.config import TransformerConfig

    matmul = None if precision is None else precision if precision in NARROW else "dtype"
    note = None if matmul is None else check_matmul(matmul)
    inner = getattr(model, "config", None) if hasattr(model, "jit_train_step") else model
    if isinstance(inner, TransformerConfig):
        stated: dict[str, Any] = {}
        if precision is not None:
            activations = "bfloat16" if precision in NARROW else precision
            stated |= {"dtype": activations, "matmul": matmul}
        if param_dtype is not None:
            stated["param_dtype"] = param_dtype
        changed = inner.replace(**stated)
        return InPrecision(changed if inner is model else model.replace(model=changed), note=note)
    if precision in NARROW:
        raise TPUModelError(
            f"precision {precision} is for the reference transformers, and this is "
            f"{type(getattr(model, 'model', model)).__name__}; call "
            f"tpukit.models.products.matmul_format.product_in({precision!r}, x, weight) in your "
            "own model."
        )
    options: dict[str, str] = {}
    if precision is not None and precision != "float32":
        options["compute_dtype"] = precision
    if param_dtype is not None:
        options["param_dtype"] = param_dtype
    return InPrecision(model, options, note)
