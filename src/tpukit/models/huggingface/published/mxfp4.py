"""MXFP4: four-bit floats, 32 of which share a power of two; how GPT-OSS publishes its experts."""

import numpy as np

from ....errors import TPUModelError
from .scheme import Json, Scheme, Tensors, take
from .weight import PublishedWeight

# A sign, two bits of exponent and one of fraction: what each code of float4_e2m1fn stands for.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
GROUP = 32
_LARGEST_EXPONENT = 254  # 255 is no number


class Mxfp4:
    """`…_blocks` uint8 (experts, out, groups, 16), two codes a byte, the lower bits first.

    And `…_scales` uint8 (experts, out, groups): exponents, 127 more than they are. The model has
    these matrices as (experts, in, out).
    """

    methods = ("mxfp4",)
    marks = (("", "_blocks"),)

    def scheme(self, config: Json) -> Scheme:
        """See `PublishedFormat`."""
        return Scheme(
            method="MXFP4",
            values="float4_e2m1fn",
            bits=4,
            block=(1, GROUP),
            scale_bits=8,
            experts_only=True,
        )

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """See `PublishedFormat`."""
        blocks = take(tensors, f"{name}_blocks", "uint8")
        scales = take(tensors, f"{name}_scales", "uint8")
        if blocks.ndim < 3 or blocks.shape[-1] != GROUP // 2:
            raise TPUModelError(
                f"'{name}_blocks' is {blocks.dtype}{list(blocks.shape)}; expected uint8 "
                f"(experts, outputs, groups, {GROUP // 2})."
            )
        if blocks.shape[:-1] != scales.shape:
            raise TPUModelError(
                f"'{name}_scales' is {scales.shape}; blocks of {blocks.shape} have one each."
            )
        values = codes_of(blocks, low_first=True).reshape(*scales.shape[:-1], -1)
        return PublishedWeight(
            LEVELS[values], powers_of_two(scales, name), (1, GROUP), transposed=True
        )


def codes_of(packed: np.ndarray, *, low_first: bool) -> np.ndarray:
    """Both four-bit codes of each byte, side by side along the last axis."""
    low, high = packed & 15, packed >> 4
    pair = (low, high) if low_first else (high, low)
    return np.stack(pair, axis=-1).reshape(*packed.shape[:-1], -1)


def powers_of_two(exponents: np.ndarray, name: str) -> np.ndarray:
    """The scales that stored exponents stand for."""
    if (exponents > _LARGEST_EXPONENT).any():
        raise TPUModelError(f"'{name}' has scales that are no numbers; the file is damaged.")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
