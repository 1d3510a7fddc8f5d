"""FP8 with a scale per block (DeepSeek, Qwen, Mistral) and MXFP4 (GPT-OSS experts)."""

import ml_dtypes
import numpy as np

from ....errors import TPUModelError
from .scheme import FLOATS, Json, PublishedWeight, Scheme, Tensors, take


class BlockFp8:
    """`weight` float8_e4m3fn (out, in) and its factors `weight_scale_inv`.

    Scales are (out/128, in/128) for blocks of 128 × 128, rounded up, or (out, 1), or one number.
    """

    methods = ("fp8", "fbgemm_fp8")
    marks = (("", "_scale_inv"), ("", "_scale"))

    def scheme(self, config: Json) -> Scheme:
        """See `PublishedFormat`."""
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2  # pyright: ignore[reportUnknownArgumentType]  JSON
            and all(isinstance(side, int) and side > 0 for side in block)  # pyright: ignore[reportUnknownVariableType]
        ):
            raise TPUModelError(
                f"quantization_config has weight_block_size={block!r}; expected [128, 128]."
            )
        by_rows = config.get("quant_method") == "fbgemm_fp8"
        whole = (1, None) if by_rows else (None, None)
        return Scheme(
            method="FP8" if block is None else "FP8 block",
            values="float8_e4m3fn",
            bits=8,
            block=whole if block is None else (block[0], block[1]),  # pyright: ignore[reportUnknownArgumentType]
            scale_bits=32,
            activations="float8_e4m3fn",
        )

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """See `PublishedFormat`."""
        found = next(name + end for _, end in self.marks if name + end in tensors)
        return scaled_blocks(name, tensors, scheme.block, found)


def scaled_blocks(
    name: str, tensors: Tensors, block: tuple[int | None, int | None], scaled_by: str
) -> PublishedWeight:
    """Return a weight with one scale per block, per row or for all values."""
    values = take(tensors, name, "float8_e4m3fn int8")
    scales = take(tensors, scaled_by, f"{FLOATS} uint8 float8_e8m0fnu")
    if values.ndim < 2 or not values.size:
        raise TPUModelError(f"'{name}' has shape {values.shape}; expected (outputs, inputs).")
    rows, columns = values.shape[-2:]
    if scales.dtype == np.uint8:  # exponents of a microscaling format
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    if scales.ndim < 2 or scales.size == 1:
        whole = scales.size == 1
        scales = scales.reshape((1,) * values.ndim) if whole else scales.reshape(-1, 1)
        sides = (rows if whole else 1, columns)
    elif scales.shape[-1] == 1 and scales.shape[-2] == rows:
        sides = (1, columns)
    else:
        sides = (block[0] or rows, block[1] or columns)
    return PublishedWeight(values, scales.astype(np.float32), sides)


# The values of float4_e2m1fn codes: a sign, two bits of exponent and one of fraction.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
GROUP = 32
_LARGEST_EXPONENT = 254  # 255 is NaN


class Mxfp4:
    """`…_blocks` uint8 (experts, out, groups, 16), two codes per byte with the lower bits first.

    `…_scales` uint8 (experts, out, groups) are exponents with an offset of 127. The model has these
    matrices as (experts, in, out).
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
                f"'{name}_scales' is {scales.shape}; expected one per block of {blocks.shape}."
            )
        values = codes_of(blocks, low_first=True).reshape(*scales.shape[:-1], -1)
        return PublishedWeight(
            LEVELS[values], powers_of_two(scales, name), (1, GROUP), transposed=True
        )


def codes_of(packed: np.ndarray, *, low_first: bool) -> np.ndarray:
    """Return both 4-bit codes of each byte along the last axis."""
    low, high = packed & 15, packed >> 4
    pair = (low, high) if low_first else (high, low)
    return np.stack(pair, axis=-1).reshape(*packed.shape[:-1], -1)


def powers_of_two(exponents: np.ndarray, name: str) -> np.ndarray:
    """Return the scales of stored exponents."""
    if (exponents > _LARGEST_EXPONENT).any():
        raise TPUModelError(f"'{name}' has scales that are NaN; the file is damaged.")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
