"""Parts of a layer that only some transformers have, as plain data that needs no jax to read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import TPUModelError, did_you_mean
from .field_types import check_types

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values come from one short vector a token (MLA, DeepSeek V2).

    Attributes:
        kv_rank: Channels of the vector that keys and values are made of; with the rotated key,
            all that a cache holds.
        q_rank: Channels of the vector that queries are made of; 0 makes them at once.
        nope_dim: Channels of a query and key head that know nothing of positions.
        rope_dim: Rotated channels, whose key all heads share.
        v_dim: Channels of a value head.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "latent", ("kv_rank", "nope_dim", "rope_dim", "v_dim"))
        if self.rope_dim % 2:
            raise TPUModelError(f"latent.rope_dim={self.rope_dim} is odd; channels turn in pairs.")

    @property
    def qk_dim(self) -> int:
        """Channels of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule (Qwen3-Next): a state instead of a cache.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple of `key_heads`.
        key_dim: Channels of a query or key head.
        value_dim: Channels of a value head.
        convolution: Tokens that the short convolution before it looks at, the newest included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int = 4

    def __post_init__(self) -> None:
        _check_positive(
            self, "delta", ("key_heads", "value_heads", "key_dim", "value_dim", "convolution")
        )
        if self.value_heads % self.key_heads:
            raise TPUModelError(
                f"delta.value_heads={self.value_heads} is not a multiple of "
                f"delta.key_heads={self.key_heads}; every key head serves as many value heads."
            )


def read_part(kind: type[Part], given: Any, field: str) -> Part | None:
    """The part that a table of a file describes; an empty table, like None, is no part.

    Raises:
        TPUModelError: A key is not known, or one is missing.
    """
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TPUModelError(f"{field}={given!r}; write a table of its settings, or leave it out.")
    table: dict[str, Any] = dict(given)  # pyright: ignore[reportUnknownArgumentType]  from a file
    known = {f.name: f for f in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    for key in table:
        if key not in known:
            raise TPUModelError(
                f"'{key}' is not a setting of {field}; known are {', '.join(known)}."
                + did_you_mean(str(key), known)
            )
    missing = [f.name for f in known.values() if f.default is dataclasses.MISSING]
    absent = [name for name in missing if name not in table]
    if table and absent:
        raise TPUModelError(f"{field} has no {', '.join(absent)}; give every dimension of it.")
    check_types(kind, table, where=f"{field}.")
    return kind(**table) if table else None


def _check_positive(part: object, field: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(part, name) < 1:
            raise TPUModelError(f"{field}.{name}={getattr(part, name)}; it must be at least 1.")
