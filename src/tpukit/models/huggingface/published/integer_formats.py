"""GPTQ and AWQ: integers with zero points, packed into 32-bit words."""

import numpy as np

from ....errors import TPUModelError
from .scheme import (
    FLOATS,
    Json,
    PublishedWeight,
    Scheme,
    Tensors,
    group_size,
    integer,
    take,
    unpack_bits,
)

# The first format stores zero points minus one, the second stores them unchanged.
_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Gptq:
    """Weights that AutoGPTQ, GPTQModel and transformers write.

    For an (out, in) matrix of b bits: `qweight` int32 (in·b/32, out), `qzeros` int32
    (groups, out·b/32), `scales` (groups, out) and `g_idx` (in), the group of each input.
    """

    methods = ("gptq",)
    marks = (("weight", "qweight"),)

    def scheme(self, config: Json) -> Scheme:
        """See `PublishedFormat`."""
        kind = config.get("checkpoint_format", "gptq")
        if kind not in _OFFSETS:
            raise TPUModelError(
                f"the weights are packed as '{kind}', for one GPU kernel; expected "
                f"{' or '.join(_OFFSETS)}. Use the checkpoint that it was packed from."
            )
        bits = integer(config, "bits", (2, 3, 4, 8))
        symmetric = bool(config.get("sym", True))
        return Scheme(
            method="GPTQ",
            packing=kind,
            values=f"int{bits}" if symmetric else f"uint{bits}",
            bits=bits,
            block=(1, group_size(config, 128)),
            zero_bits=bits,
            reordered=bool(config.get("desc_act", False)),
        )

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """See `PublishedFormat`."""
        base = name.removesuffix("weight")
        scales = take(tensors, f"{base}scales", FLOATS, 2)
        packed = take(tensors, f"{base}qweight", "int32", 2)
        outputs = scales.shape[1]
        inputs = packed.shape[0] * 32 // scheme.bits
        values = unpack_bits(packed.T, scheme.bits, inputs)
        zeros = unpack_bits(take(tensors, f"{base}qzeros", "int32", 2), scheme.bits, outputs)
        # A zero point of 0 is stored as the largest value, which wraps to 0 with the offset.
        zeros = (zeros + _OFFSETS[scheme.packing]) & ((1 << scheme.bits) - 1)
        group = scheme.block[1] or max(1, inputs)
        order = None
        if f"{base}g_idx" in tensors:
            order = take(tensors, f"{base}g_idx", "int32 int64", 1).astype(np.int64)
        if order is not None and np.array_equal(order, np.arange(inputs) // group):
            order = None
        return PublishedWeight(values, scales.T.astype(np.float32), (1, group), zeros.T, order)


# The output of each 4-bit value of a word, the lowest bits first.
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
                f"the weights are packed as AWQ '{version}', for other GPU kernels; expected "
                "'gemm'. Use a checkpoint of that version."
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
        raise TPUModelError(
            f"there are {values.shape[-1]} outputs; expected a multiple of {len(ORDER)}."
        )
    by_word = values.reshape(*values.shape[:-1], values.shape[-1] // len(ORDER), len(ORDER))
    return by_word[..., _PLACES].reshape(values.shape)
