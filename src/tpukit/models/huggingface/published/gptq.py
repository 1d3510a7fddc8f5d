"""GPTQ: integers packed along the inputs, zero points stored one too small."""

import numpy as np

from ....errors import TPUModelError
from .scheme import FLOATS, Json, Scheme, Tensors, group_size, integer, take, unpack_bits
from .weight import PublishedWeight

# Files of the first format hold zero points less one; the second holds them as they are.
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
                f"the weights are packed as '{kind}', for one kernel of GPUs; read are "
                f"{' and '.join(_OFFSETS)}. Take the checkpoint that it was packed from."
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
        # A zero point of 0 is stored as the largest value, so that one more is 0 again.
        zeros = (zeros + _OFFSETS[scheme.packing]) & ((1 << scheme.bits) - 1)
        group = scheme.block[1] or max(1, inputs)
        order = None
        if f"{base}g_idx" in tensors:
            order = take(tensors, f"{base}g_idx", "int32 int64", 1).astype(np.int64)
        if order is not None and np.array_equal(order, np.arange(inputs) // group):
            order = None
        return PublishedWeight(values, scales.T.astype(np.float32), (1, group), zeros.T, order)
