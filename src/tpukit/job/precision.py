"""Apply the number formats of a job to its model."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import TPUModelError
from ..plain_data import JsonObject

Precision = Literal[
    "bfloat16", "float32", "float16", "float8", "float8_static", "float8_channels", "int8"
]
ParamDtype = Literal["bfloat16", "float32", "float16"]
# 8-bit formats apply to matmul operands only; `TransformerConfig.matmul` has these names.
NARROW = ("float8", "float8_static", "float8_channels", "int8")


@dataclass(frozen=True)
class InPrecision:
    """A model with the number formats of a job.

    Attributes:
        model: The model; a `TransformerConfig` has the formats set.
        options: Arguments of `Workload` that set the formats of any other model.
        note: A note for the user, such as a format that this machine emulates.
    """

    model: Any
    options: dict[str, str] = field(default_factory=dict[str, str])
    note: str | None = None


def in_precision(
    model: Any, precision: Precision | None, param_dtype: ParamDtype | None
) -> InPrecision:
    """Apply number formats to a model; None keeps the model's own.

    Raises:
        TPUModelError: An 8-bit format for a model that is no reference transformer, or for a chip
            that does not multiply it.
    """
    from ..models.matmul.matmul_format import check_matmul
    from ..models.transformer.config import TransformerConfig

    matmul = None if precision is None else precision if precision in NARROW else "dtype"
    note = None if matmul is None else check_matmul(matmul)
    inner = getattr(model, "config", None) if hasattr(model, "jit_train_step") else model
    if isinstance(inner, TransformerConfig):
        stated: JsonObject = {}
        if precision is not None:
            activations = "bfloat16" if precision in NARROW else precision
            stated |= {"dtype": activations, "matmul": matmul}
        if param_dtype is not None:
            stated["param_dtype"] = param_dtype
        changed = inner.replace(**stated)
        return InPrecision(changed if inner is model else model.replace(model=changed), note=note)
    if precision in NARROW:
        raise TPUModelError(
            f"precision {precision} needs a reference transformer, but the model is "
            f"{type(getattr(model, 'model', model)).__name__}; call "
            f"tpukit.models.matmul.matmul_format.matmul_in_format({precision!r}, x, weight) in "
            "your own model."
        )
    options: dict[str, str] = {}
    if precision is not None and precision != "float32":
        options["compute_dtype"] = precision
    if param_dtype is not None:
        options["param_dtype"] = param_dtype
    return InPrecision(model, options, note)
