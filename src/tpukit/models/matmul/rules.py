"""Rules that choose the matmul format of each module by its path.

A rule is a regular expression and a format, `{"layers/.*": "float8_static", "o_proj": "dtype"}`. It
matches a module if it fully matches the module's path or an end of the path that starts at a name:
"o_proj" and "self_attention/.*" both match `layers/self_attention/o_proj`. The last matching rule
counts, so general rules come first.

Reference transformers apply the rules themselves. In other flax models qwix replaces every
`dot_general` and `ragged_dot` by a quantized one, chosen by module path (`with_qwix`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flax import nnx

from ...errors import TPUModelError, did_you_mean
from ...hardware.formats import FLOAT8_E4M3FN, FLOAT8_E5M2
from ..transformer.config import TransformerConfig
from .eight_bit import STATIC_BOUND

Rules = Sequence[tuple[str, str]]
# Matmuls that are never quantized, because routing and the distribution over tokens depend on
# small differences.
ALWAYS_WIDE = ("router", "lm_head")
# Formats that grouped matmuls of experts support; others leave them in the activations' dtype.
GROUPED = ("float8_static", "float8_channels")


def matches(pattern: str, path: str) -> bool:
    """Whether a rule's pattern matches the module at `path`."""
    names = path.split("/")
    return any(
        re.fullmatch(pattern, "/".join(names[first:])) is not None for first in range(len(names))
    )


def format_of(path: str, rules: Rules, default: str) -> str:
    """Return the matmul format of the module at `path`."""
    if path.split("/")[-1] in ALWAYS_WIDE:
        return "dtype"
    found = [format for pattern, format in rules if matches(pattern, path)]
    if found:
        return found[-1]
    return default if not is_experts(path) or default in GROUPED else "dtype"


def is_experts(path: str) -> bool:
    """Whether the module at `path` has grouped matmuls."""
    return path.split("/")[-1] == "experts"


@runtime_checkable
class MultipliesWeights(Protocol):
    """A module whose matmuls with weights have a format."""

    matmul: str


def apply_matmul_rules(model: nnx.Module, config: TransformerConfig) -> None:
    """Set the matmul format of every module with weights, in place.

    Raises:
        TPUModelError: A rule matches no such module, or a module does not support its format.
    """
    modules = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, MultipliesWeights)
    }
    check_rules(config.matmul_rules, modules)
    _give_formats(modules, config)


def apply_layer_rules(layer: nnx.Module, config: TransformerConfig, *, path: str) -> None:
    """Set the matmul formats of one kind of layer; `apply_matmul_rules` has checked the rules.

    Args:
        layer: The layer, changed in place.
        config: The configuration with the rules.
        path: The path of the layer's stack.
    """
    modules = {
        "/".join((path, *map(str, inner))): module
        for inner, module in nnx.iter_modules(layer)
        if isinstance(module, MultipliesWeights)
    }
    _give_formats(modules, config)


def _give_formats(modules: Mapping[str, MultipliesWeights], config: TransformerConfig) -> None:
    for path, module in modules.items():
        module.matmul = format_of(path, config.matmul_rules, config.matmul)


def check_rules(rules: Rules, paths: Iterable[str]) -> None:
    """Check that every rule has an effect on a model with matmuls at `paths`.

    Raises:
        TPUModelError: A rule has none; the message names the rule and the nearest path.
    """
    known = sorted(paths)
    for pattern, format in rules:
        try:
            found = [path for path in known if matches(pattern, path)]
        except re.error as error:
            raise TPUModelError(
                f"matmul_rules has {pattern!r}, which is not a regular expression: {error}."
            ) from error
        if not found:
            tails = {"/".join(path.split("/")[first:]) for path in known for first in range(3)}
            raise TPUModelError(
                f"the rule {pattern!r}: {format!r} of matmul_rules matches no matmul of this "
                f"model; it has {', '.join(known)}.{did_you_mean(pattern, tails)}"
            )
        if format == "dtype":
            continue
        if all(path.split("/")[-1] in ALWAYS_WIDE for path in found):
            raise TPUModelError(
                f"the rule {pattern!r}: {format!r} of matmul_rules matches only "
                f"{', '.join(found)}, which is never quantized; leave it out, or use 'dtype'."
            )
        if format not in GROUPED and all(map(is_experts, found)):
            raise TPUModelError(
                f"the rule {pattern!r}: {format!r} of matmul_rules matches only "
                f"{', '.join(found)}, whose grouped matmuls support {' or '.join(GROUPED)}."
            )


# As in the published runs; matmuls written as einsum are not quantized.
OPS = ("dot_general", "ragged_dot")
_KNOWN = ("dtype", "float8_static", "float8_channels")


def qwix_rules(
    rules: Rules, default: str = "dtype", *, bound: float = STATIC_BOUND
) -> Sequence[Any]:
    """Return rules for `qwix.QtProvider` that are equivalent to `matmul_rules`.

    Args:
        rules: Patterns of module paths and formats; the last matching rule counts.
        default: The format of all other modules.
        bound: The largest magnitude that is not clipped by constant scales.

    Raises:
        TPUModelError: qwix is not installed, or does not support a format.
    """
    try:
        from qwix import QtRule
    except ImportError as error:
        raise TPUModelError(
            "matmul formats by module path of a flax model need qwix, which is not installed; "
            "run pip install 'tpukit[quant]'."
        ) from error

    def rule(path: str, format: str) -> QtRule:
        if format == "dtype":
            return QtRule(module_path=path)
        if format not in _KNOWN:
            raise TPUModelError(
                f"'{format}' is not supported for flax models through qwix; use one of "
                f"{', '.join(_KNOWN)}."
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

    # qwix takes the first matching rule and matches full paths only.
    specific = [rule(f"(?:.*/)?(?:{pattern})", format) for pattern, format in reversed(rules)]
    return [*specific, rule(".*", default)]


def with_qwix(model: Any, rules: Rules, default: str = "dtype", **options: Any) -> Any:
    """Return a flax linen module with matmuls in the formats of `qwix_rules`."""
    converted = qwix_rules(rules, default, **options)
    from qwix import QtProvider, quantize_model

    return quantize_model(model, QtProvider(converted))
