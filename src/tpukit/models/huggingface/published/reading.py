"""The published format of a checkpoint, and its weights by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ....errors import TPUModelError, did_you_mean
from .bitsandbytes import BitsAndBytes
from .compressed import CompressedTensors
from .float_formats import BlockFp8, Mxfp4
from .integer_formats import Awq, Gptq
from .scheme import PublishedFormat, PublishedWeight, Scheme, Tensors

FORMATS: tuple[PublishedFormat, ...] = (
    *(Gptq(), Awq(), CompressedTensors(), BlockFp8(), Mxfp4(), BitsAndBytes()),
)
# Name endings of packed tensors, which replace the tensor with the weight's own name.
_PACKED = ("qweight", "_packed", "_blocks")


@dataclass(frozen=True)
class Quantization:
    """The format of a quantized checkpoint and its settings."""

    format: PublishedFormat
    scheme: Scheme

    def holds(self, name: str, tensors: Tensors) -> bool:
        """Whether the weight of this name is stored quantized."""
        return any(
            name.endswith(own) and name.removesuffix(own) + mark in tensors
            for own, mark in self.format.marks
        )

    def names(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of quantized weights in a checkpoint with these tensors."""
        stored = set(tensors)
        found = (
            (tensor.removesuffix(mark) + own, mark)
            for own, mark in self.format.marks
            for tensor in stored
            if tensor.endswith(mark)
        )
        # Scales of caches and activations have the same endings, but no tensor of values.
        return sorted({name for name, mark in found if name in stored or mark in _PACKED})

    def read(self, name: str, tensors: Tensors) -> PublishedWeight:
        """Return the weight of this name.

        Raises:
            TPUModelError: Its tensors are incomplete, or do not match.
        """
        try:
            return self.format.decode(name, self.scheme, tensors)
        except KeyError as missing:
            raise TPUModelError(
                f"{missing} is not in the checkpoint, but '{name}' needs it; download it again."
            ) from None
        except TPUModelError as error:
            if f"'{name}" in str(error):
                raise
            raise TPUModelError(f"'{name}': {error}") from None


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of a model's `config.json`, or None where it is not quantized.

    Raises:
        TPUModelError: The quantization is not supported.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None and isinstance(config.get("text_config"), Mapping):
        found = cast("Mapping[str, Any]", config["text_config"]).get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise TPUModelError(f"quantization_config is a {type(found).__name__}; expected an object.")
    settings = cast("Mapping[str, Any]", found)
    method = str(settings.get("quant_method", "")).lower()
    if not method and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        method = "bitsandbytes"  # early files leave it out
    for one in FORMATS:
        if method in one.methods:
            try:
                return Quantization(one, one.scheme(settings))
            except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
                raise TPUModelError(
                    f"quantization_config of '{method}' is invalid ({error}); download it again."
                ) from None
    known = [name for one in FORMATS for name in one.methods]
    raise TPUModelError(
        f"quant_method '{method}' is not supported; expected one of {', '.join(known)}."
        f"{did_you_mean(method, known)} Use the checkpoint that it was quantized from, or one of "
        "those formats."
    )
