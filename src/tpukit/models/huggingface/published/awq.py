"""AWQ: four bits with zero points, eight outputs to a word in an order of their own."""

import numpy as np

from ....errors import TPUModelError
from .scheme import FLOATS, Json, Scheme, Tensors, group_size, integer, take, unpack_bits
from .weight import PublishedWeight

# The output that each four bits of a word belong to, the lowest bits first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = np.argsort(ORDER)


class Awq:
    """Weights that AutoAWQ writes for its "gemm" kernels.

    For an (out, in) matrix: `qweight` int32 (in, out/8), `qzeros` int32 (groups, out/8) and
    `scales` (groups, out).
    """

    methods = ("awq",)
    marks = (("weight", "qweight"),)

    def scheme(self, config: Json) -> Scheme:
        """See `PublishedFormat`."""
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise TPUModelError(
                f"the weights are packed as AWQ '{version}', for other kernels of GPUs; read is "
                "'gemm'. Take a checkpoint of that version."
            )
        bits = integer(config, "bits", (4,), default=config.get("w_bit"))
        sizes = {"group_size": config.get("group_size", config.get("q_group_size", 128))}
        zeros = bool(config.get("zero_point", True))
        return Scheme(
            method="AWQ",
            values="uint4" if zeros else "int4",
            bits=bits,
            block=(1, group_size(sizes)),
            zero_bits=bits,
        )

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """See `PublishedFormat`."""
        base = name.removesuffix("weight")
        scales = take(tensors, f"{base}scales", FLOATS, 2)
        packed = take(tensors, f"{base}qweight", "int32", 2)
        packed_zeros = take(tensors, f"{base}qzeros", "int32", 2)
        outputs = scales.shape[1]
        values = _ordered(unpack_bits(packed, scheme.bits, outputs))
        zeros = _ordered(unpack_bits(packed_zeros, scheme.bits, outputs))
        group = scheme.block[1] or max(1, values.shape[0])
        return PublishedWeight(values.T, scales.T.astype(np.float32), (1, group), zeros.T)


def _ordered(values: np.ndarray) -> np.ndarray:
    if values.shape[-1] % len(ORDER):
        raise TPUModelError(f"{values.shape[-1]} outputs fill no words of {len(ORDER)}.")
    by_word = values.reshape(*values.shape[:-1], values.shape[-1] // len(ORDER), len(ORDER))
    return by_word[..., _PLACES].reshape(values.shape)
