"""`tpukit generate --kv`: the cache that was asked for, and what it changed of the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.generation import CacheSpec, Generation, Sampling
    from ..training.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """What a narrow cache changed of one text (origin: measured).

    Attributes:
        format: Of the cache.
        bits: Of a value, at the length of this text.
        kept: Share of the tokens that a full cache would have chosen after the same text, with the
            same seed; None where nothing was measured.
        target: What it was to reach.
    """

    format: str
    bits: float
    kept: float | None
    target: float

    @property
    def reached(self) -> bool | None:
        """Whether enough is kept; None where nothing was measured."""
        return None if self.kept is None else self.kept >= self.target

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "format": self.format,
            "bits": self.bits,
            "choices_kept": self.kept,
            "target": self.target,
            "reached": self.reached,
        }

    def line(self) -> str:
        """One sentence."""
        about = f"KV cache in {self.format} ({self.bits:.2f} bits a value): "
        if self.kept is None:
            return about + "what it changed was not measured"
        said = "yes" if self.reached else "no"
        return about + (
            f"{said}, {self.kept:.1%} of the tokens are those that a full cache would have chosen "
            f"after the same text (measured; asked for is {self.target:.0%})"
        )


def cache_spec(name: str, model: "TrainedModel") -> "CacheSpec":
    """The cache of a name, or of a folder that `tpukit quantize --kv … -o` wrote."""
    from ..models.generation import CacheSpec
    from ..quantization.cache.codebooks import is_cache_folder, load_cache

    folder = Path(name).expanduser()
    return load_cache(folder, model.config) if is_cache_folder(folder) else CacheSpec.of(name)


def measure_use(
    model: "TrainedModel",
    spec: "CacheSpec",
    prompt: Sequence[int],
    found: "Generation",
    sampling: "Sampling",
    target: float,
) -> CacheUse:
    """Read the text again with a full cache; a target of 0 measures nothing."""
    from ..models.generation import Generator
    from ..quantization.cache.retention import cache_bits, share_kept

    kept = None
    if target > 0:
        full = Generator(model.config, model.params)
        kept = share_kept(full, [prompt], found, sampling)
    length = len(prompt) + len(found.tokens[0])
    bits = cache_bits(model.config, spec.format, length)
    return CacheUse(format=spec.format.name, bits=bits, kept=kept, target=target)
