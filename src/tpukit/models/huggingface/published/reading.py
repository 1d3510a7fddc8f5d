"""Which format a checkpoint is published in, and its weights by the names a model has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ....errors import TPUModelError, did_you_mean
from .awq import Awq
from .bitsandbytes import BitsAndBytes
from .compressed import CompressedTensors
from .fp8 import BlockFp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .scheme import PublishedFormat, Scheme, Tensors
from .weight import PublishedWeight

FORMATS: tuple[PublishedFormat, ...] = (
    *(Gptq(), Awq(), CompressedTensors(), BlockFp8(), Mxfp4(), BitsAndBytes()),
)
# Ends of tensors that hold values, so that no tensor has the weight's own name.
_PACKED = ("qweight", "_packed", "_blocks")


@dataclass(frozen=True)
class Quantization:
    """The format of a checkpoint and what its configuration says of it."""

    format: PublishedFormat
    scheme: Scheme

    def holds(self, name: str, tensors: Tensors) -> bool:
        """Whether the weight of that name is stored quantized."""
        return any(
            name.endswith(own) and name.removesuffix(own) + mark in tensors
            for own, mark in self.format.marks
        )

    def names(self, tensors: Iterable[str]) -> list[str]:
        """The weights that are stored quantized, of a checkpoint with these tensors."""
        stored = set(tensors)
        found = (
            (tensor.removesuffix(mark) + own, mark)
            for own, mark in self.format.marks
            for tensor in stored
            if tensor.endswith(mark)
        )
        # Scales of caches and activations end like those of weights, and belong to no tensor.
        return sorted({name for name, mark in found if name in stored or mark in _PACKED})

    def read(self, name: str, tensors: Tensors) -> PublishedWeight:
        """The weight of that name.

        Raises:
            TPUModelError: Its tensors are incomplete, or do not belong together.
        """
        try:
            return self.format.decode(name, self.scheme, tensors)
        except KeyError as missing:
            raise TPUModelError(
                f"{missing} is not in the checkpoint; '{name}' cannot be read without it."
            ) from None
        except TPUModelError as error:
            if f"'{name}" in str(error):
                raise
            raise TPUModelError(f"'{name}': {error}") from None


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """What the `config.json` of a model says of its weights; None where they are not quantized.

    Raises:
        TPUModelError: They are, in a way that is not read here.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None and isinstance(config.get("text_config"), Mapping):
        found = cast("Mapping[str, Any]", config["text_config"]).get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise TPUModelError(f"quantization_config is a {type(found).__name__}, not an object.")
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
                    f"quantization_config of '{method}' is not as its library writes it ({error})."
                ) from None
    known = [name for one in FORMATS for name in one.methods]
    raise TPUModelError(
        f"quant_method '{method}' is not read here; {', '.join(known)} are."
        f"{did_you_mean(method, known)} Take the checkpoint that it was quantized from, or one of "
        "those formats."
    )
