"""`QuantPlan`: the format of every matrix of a model, and the rules that choose it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from ..errors import TPUValidationError, did_you_mean
from ..hardware.stored_formats import rounded_formats
from ..models.stored.calibration import ModelMatrices, ModelMatrix
from ..plain_data import JsonMapping, JsonObject
from ..shown import Shown
from .formats import VQ_FORMATS, parse_vq_format

SKIP = "skip"
# (pattern of a matrix's name, format): the last one that matches counts.
Rules = Sequence[tuple[str, str]]

# What costs most accuracy for the least bytes; see `DEFAULT_SKIPS` for what rules may say of it.
DEFAULT_SKIPS: tuple[tuple[str, str], ...] = (
    (r"embed|embedding|wte|wpe", "an embedding"),
    (r"norm|(^|/)ln", "a norm"),
    (r"router|(^|/)gate(/|$)|shared_gate", "a router's choice turns on it"),
    (r"lm_head|unembed|readout", "the unembedding"),
)
# Below this a matrix saves nothing: its scales and codebook weigh as much as it does.
LEAST_WEIGHTS = 1024


def known_formats() -> tuple[str, ...]:
    """Return the names of formats: by a codebook, rounded with scales, bfloat16, or none."""
    return (*VQ_FORMATS, *rounded_formats(), "bf16", SKIP)


def check_format(name: str) -> str:
    """Return the canonical name of a format.

    Raises:
        TPUValidationError: The format is unknown.
    """
    known = known_formats()
    if name in known:
        return name
    if name.startswith(("vq:", "trellis")):
        return parse_vq_format(name).name
    raise TPUValidationError(
        f"{name!r} is no format of a plan; expected one of {', '.join(known)} and "
        f"vq:<stages>x<entries>x<length>.{did_you_mean(name, known)}"
    )


@dataclass(frozen=True)
class QuantPlan(Shown):
    """A format for every matrix.

    Attributes:
        formats: By name of the matrix, in the order of the model's matmuls.
        reasons: By name, why a matrix is not quantized.
        unused_rules: Patterns of rules that match no matrix.
    """

    formats: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    unused_rules: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names of the quantized matrices."""
        return tuple(name for name, format in self.formats.items() if format != SKIP)

    def with_formats(self, formats: Mapping[str, str]) -> "QuantPlan":
        """Return the plan with other formats for some matrices."""
        return QuantPlan({**self.formats, **formats}, self.reasons, self.unused_rules)

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
        return {
            "formats": dict(self.formats),
            "reasons": dict(self.reasons),
            "unused_rules": list(self.unused_rules),
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "QuantPlan":
        """Read a plan that `to_dict` wrote.

        Raises:
            TPUValidationError: A format is unknown.
        """
        formats = {str(name): check_format(format) for name, format in data["formats"].items()}
        return cls(formats, dict(data.get("reasons", {})), tuple(data.get("unused_rules", ())))

    def __rich__(self) -> Table:
        table = Table("format", "matrices", title=f"{len(self.quantized)} matrices quantized")
        for format, count in Counter(self.formats.values()).most_common():
            table.add_row(format, str(count))
        for pattern in self.unused_rules:
            table.add_row(f"rule {pattern!r}", "matches nothing")
        return table


def make_plan(
    matrices: ModelMatrices, format: str, *, rules: Rules = (), skip_ends: bool = True
) -> QuantPlan:
    """Give all matrices one format, except those that are skipped by default or named by rules.

    Args:
        matrices: The model's matrices.
        format: The format of all other matrices.
        rules: (pattern, format) pairs. Patterns are searched in names like
            "layers/mlp/up_proj/kernel[3]"; the last match wins, also over default skips.
        skip_ends: Whether to skip the first and the last matrix as well, except in models of few
            matrices.
    """
    check_format(format)
    for _, wanted in rules:
        check_format(wanted)
    reasons: dict[str, str] = {}
    formats: dict[str, str] = {}
    for matrix in matrices.found:
        why = _skipped(matrix)
        formats[matrix.name] = SKIP if why else format
        if why:
            reasons[matrix.name] = why
    if skip_ends:
        reasons |= _ends(matrices.found, formats)
    formats |= dict.fromkeys(reasons, SKIP)
    used: set[str] = set()
    for name in formats:
        for pattern, wanted in rules:
            if re.search(pattern, name):
                used.add(pattern)
                formats[name] = wanted
                reasons.pop(name, None)
                if wanted == SKIP:
                    reasons[name] = f"rule {pattern!r}"
    unused = tuple(pattern for pattern, _ in rules if pattern not in used)
    return QuantPlan(formats, reasons, unused)


def _skipped(matrix: ModelMatrix) -> str:
    if matrix.shape[0] * matrix.shape[1] < LEAST_WEIGHTS:
        return f"only {matrix.shape[0] * matrix.shape[1]} weights"
    return next((why for p, why in DEFAULT_SKIPS if re.search(p, matrix.path)), "")


def _ends(matrices: Iterable[ModelMatrix], formats: Mapping[str, str]) -> dict[str, str]:
    """Return the first and last matrix of a model without an embedding or unembedding."""
    left = [matrix for matrix in matrices if formats[matrix.name] != SKIP]
    stacked = any(matrix.index for matrix in left)
    if stacked or len(left) < len(formats) or len(left) < 4:
        return {}
    return {left[0].name: "the first matrix", left[-1].name: "the last matrix"}


def parse_rules(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Parse rules of the form "pattern=format".

    Raises:
        TPUValidationError: A rule has no "=", or its format or pattern is not valid.
    """
    rules: list[tuple[str, str]] = []
    for text in texts:
        pattern, equals, format = text.rpartition("=")
        if not equals or not pattern:
            raise TPUValidationError(
                f"the rule {text!r} is not of the form PATTERN=FORMAT, like 'mlp/down=int8'."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise TPUValidationError(
                f"the pattern {pattern!r} of a rule is no regular expression: {error}."
            ) from None
        rules.append((pattern, check_format(format)))
    return rules
