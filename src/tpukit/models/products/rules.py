"""Formats of products by module path: which layers of a model round to eight bits.

A rule is a regular expression and a format, `{"layers/.*": "float8_static", "o_proj": "dtype"}`. It
matches a module whose path, or the end of whose path from one of its names on, it describes as a
whole: "o_proj" and "self_attention/.*" both match `layers/self_attention/o_proj`. Of several that
match, the last one counts, so the general ones come first.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from flax import nnx

from ...errors import TPUModelError, did_you_mean
from ..transformer.config import TransformerConfig

Rules = Sequence[tuple[str, str]]
# Products that no format makes narrower: a choice of experts and a distribution over tokens turn
# on small differences.
ALWAYS_WIDE = ("router", "lm_head")
# Formats that are for the grouped products of experts as well; `matmul` alone with another one
# leaves them as wide as activations.
GROUPED = ("float8_static", "float8_channels")


def matches(pattern: str, path: str) -> bool:
    """Whether a rule's pattern is for the module at `path`."""
    names = path.split("/")
    return any(
        re.fullmatch(pattern, "/".join(names[first:])) is not None for first in range(len(names))
    )


def format_of(path: str, rules: Rules, default: str) -> str:
    """The format of the products of the module at `path`."""
    if path.split("/")[-1] in ALWAYS_WIDE:
        return "dtype"
    found = [format for pattern, format in rules if matches(pattern, path)]
    if found:
        return found[-1]
    return default if not is_experts(path) or default in GROUPED else "dtype"


def is_experts(path: str) -> bool:
    """Whether products of the module at `path` are grouped ones."""
    return path.split("/")[-1] == "experts"


@runtime_checkable
class MultipliesWeights(Protocol):
    """A module whose products with weights have a format."""

    matmul: str


def apply_matmul_rules(model: nnx.Module, config: TransformerConfig) -> None:
    """Give every module that multiplies weights the format of its path.

    Raises:
        TPUModelError: A rule matches no such module, or asks for what a module cannot do.
    """
    modules = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, MultipliesWeights)
    }
    check_rules(config.matmul_rules, modules)
    _give_formats(modules, config)


def apply_layer_rules(layer: nnx.Module, config: TransformerConfig, *, path: str) -> None:
    """The same for one kind of layer, whose rules `apply_matmul_rules` has checked.

    Args:
        layer: Its modules are given formats.
        config: Has the rules.
        path: Of the stack it is of.
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
    """Refuse a rule that has no effect on a model whose products are made at `paths`.

    Raises:
        TPUModelError: Naming the rule, and the nearest path.
    """
    known = sorted(paths)
    for pattern, format in rules:
        try:
            found = [path for path in known if matches(pattern, path)]
        except re.error as error:
            raise TPUModelError(
                f"matmul_rules have {pattern!r}, which is no regular expression: {error}."
            ) from error
        if not found:
            tails = {"/".join(path.split("/")[first:]) for path in known for first in range(3)}
            raise TPUModelError(
                f"the rule {pattern!r}: {format!r} of matmul_rules matches no product of this "
                f"model; there are {', '.join(known)}.{did_you_mean(pattern, tails)}"
            )
        if format == "dtype":
            continue
        if all(path.split("/")[-1] in ALWAYS_WIDE for path in found):
            raise TPUModelError(
                f"the rule {pattern!r}: {format!r} of matmul_rules is for {', '.join(found)} "
                "alone, which is never made narrower; leave it out, or say 'dtype'."
            )
        if format not in GROUPED and all(map(is_experts, found)):
            raise TPUModelError(
                f"the rule {pattern!r}: {format!r} of matmul_rules is for {', '.join(found)} "
                f"alone, whose products are grouped; those are made in {' or '.join(GROUPED)}."
            )
