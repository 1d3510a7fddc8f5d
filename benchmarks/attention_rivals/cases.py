"""The shapes of attention that are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One shape of causal bfloat16 self-attention."""

    tokens: int
    heads: int = 8
    kv_heads: int = 8
    window: int | None = None
    width: int = 128

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads


BASE = "causal_4096"  # the case whose whole grid is timed; others start from its best
CASES = {
    BASE: Case(4096),
    "causal_8192": Case(8192),
    "gqa_32_8_4096": Case(4096, heads=32),
    "window_1024_4096": Case(4096, window=1024),
}
