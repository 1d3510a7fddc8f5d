"""FP8 with a scale for each block: how DeepSeek, and after it Qwen and Mistral, publish weights."""

import ml_dtypes
import numpy as np

from ....errors import TPUModelError
from .scheme import FLOATS, Json, Scheme, Tensors, take
from .weight import PublishedWeight


class BlockFp8:
    """`weight` float8_e4m3fn (out, in) and `weight_scale_inv`, which values are multiplied with.

    Scales are (out/128, in/128) for blocks of 128 × 128, rounded up; or (out, 1), or one number.
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
    """Values with scales of which there is one for a block, a row or all of them."""
    values = take(tensors, name, "float8_e4m3fn int8")
    scales = take(tensors, scaled_by, f"{FLOATS} uint8 float8_e8m0fnu")
    if values.ndim < 2 or not values.size:
        raise TPUModelError(f"'{name}' has shape {values.shape}; expected (outputs, inputs).")
    rows, columns = values.shape[-2:]
    if scales.dtype == np.uint8:  # exponents, as the microscaling formats have them
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
