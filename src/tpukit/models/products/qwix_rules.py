"""Formats by module path for anybody's own flax model, through qwix: the one module that knows it.

The reference transformers make their products themselves. In other flax models qwix finds every
`dot_general` and `ragged_dot` by the path of its module and puts a quantized one in its place.
"""

from collections.abc import Sequence
from typing import Any

from ...errors import TPUModelError
from ...hardware.formats import FLOAT8_E4M3FN, FLOAT8_E5M2
from .float8_static import STATIC_BOUND
from .rules import Rules

# As in the published runs: products written as einsum stay wide.
OPS = ("dot_general", "ragged_dot")
_KNOWN = ("dtype", "float8_static", "float8_channels")


def qwix_rules(
    rules: Rules, default: str = "dtype", *, bound: float = STATIC_BOUND
) -> Sequence[Any]:
    """Rules for `qwix.QtProvider` that mean what `matmul_rules` do.

    Args:
        rules: Patterns of module paths and formats; the last one that matches counts.
        default: The format of all other modules.
        bound: The largest magnitude that constant scales keep.

    Raises:
        TPUModelError: qwix is not installed, or a format is not one it makes as we do.
    """
    try:
        from qwix import QtRule
    except ImportError as error:
        raise TPUModelError(
            "formats by module path of a flax model need qwix: pip install 'tpukit[quant]'."
        ) from error

    def rule(path: str, format: str) -> QtRule:
        if format == "dtype":
            return QtRule(module_path=path)
        if format not in _KNOWN:
            raise TPUModelError(
                f"'{format}' is not a format that qwix gives flax models as the reference "
                f"transformers have it; use one of {', '.join(_KNOWN)}."
            )
        method = "absmax" if format == "float8_channels" else f"fixed,{-bound},{bound}"
        return QtRule(
            module_path=path,
            op_names=OPS,
            weight_qtype=FLOAT8_E4M3FN.name,
            act_qtype=FLOAT8_E4M3FN.name,
            bwd_qtype=FLOAT8_E5M2.name,
            weight_calibration_method=method,
            act_calibration_method=method,
        )

    # qwix takes the first that matches, and matches whole paths only.
    specific = [rule(f"(?:.*/)?(?:{pattern})", format) for pattern, format in reversed(rules)]
    return [*specific, rule(".*", default)]


def with_qwix(model: Any, rules: Rules, default: str = "dtype", **options: Any) -> Any:
    """A flax linen module whose products are made in the formats of `qwix_rules`."""
    found = qwix_rules(rules, default, **options)
    from qwix import QtProvider, quantize_model

    return quantize_model(model, QtProvider(found))
