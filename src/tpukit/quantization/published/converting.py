"""A published weight as a kernel here reads it, without loss; or else as plain numbers."""

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...hardware.formats import INT4, INT8
from ...kernels.ops.quantized_matmul.packing import INT4_GROUP, pack_fp8, pack_int4, pack_int8
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from ...models.huggingface.published.scheme import Scheme
from ...models.huggingface.published.weight import PublishedWeight

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class LoadedWeight:
    """A published weight in a format of this package.

    Attributes:
        weight: What `quantized_matmul` takes, (in, out); or an array as the model has it.
        held: "int8", "int4", "fp8", or the array's dtype.
        exact: Whether it stands for the published numbers to the bit.
        reason: Why no kernel here reads it as it is; empty where one does.
    """

    weight: QuantizedWeight | np.ndarray
    held: str
    exact: bool
    reason: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.weight.nbytes


def load_weight(published: PublishedWeight) -> LoadedWeight:
    """The weight in our format where one holds it exactly; else the narrowest exact array.

    Where neither bfloat16 nor float32 holds it, it is rounded to float32, and says so.
    """
    packed, reason = _packed(published)
    if packed is not None:
        return LoadedWeight(packed, packed.format, exact=True)
    dtype = published.exact or np.dtype(np.float32)
    array = published.dequantize(dtype)
    return LoadedWeight(array, dtype.name, published.exact is not None, reason)


def held_as(scheme: Scheme) -> tuple[str, str]:
    """The format of this package that holds such weights without loss, and why if none does.

    By what the configuration says; `load_weight` asks the values themselves.
    """
    by_row = scheme.block[1] is None
    zeros = bool(scheme.zero_bits) and scheme.values.startswith("uint")
    reason = _obstacle(
        scheme.values, scheme.block[1], whole=by_row, moved=scheme.reordered, zeros=zeros
    )
    if reason:
        return "bf16", reason
    if scheme.values == "float8_e4m3fn":
        return "fp8", ""
    return ("int4" if scheme.bits <= INT4.bits else "int8"), ""


def _obstacle(values: str, group: int | None, *, whole: bool, moved: bool, zeros: bool) -> str:
    """What keeps values with scales for `group` inputs out of our formats; empty if nothing."""
    if moved:
        return "groups are of inputs that are no neighbours (desc_act)"
    if zeros:
        return "zero points move the values out of what int4 and int8 hold with one scale"
    if values == "float8_e4m3fn":
        return "" if whole else "scales are inside the sum over inputs, ours are outside"
    if not values.startswith("int"):
        return f"{values} is a table of numbers that no kernel here looks up"
    narrow = int(values.removeprefix("int")) <= INT4.bits
    if whole or (narrow and group is not None and group % INT4_GROUP == 0):
        return ""
    return f"scales for {group} inputs; ours are for {INT4_GROUP} of int4, or all of int8"


def _packed(published: PublishedWeight) -> tuple[QuantizedWeight | None, str]:
    if published.values.ndim != 2 or published.transposed:
        return None, "several matrices in one tensor, of numbers that no kernel here looks up"
    values = published.signed
    group = published.block[1]
    whole = group >= values.shape[1]
    moved = published.groups is not None
    if values.dtype == FP8:
        reason = _obstacle("float8_e4m3fn", group, whole=whole, moved=moved, zeros=False)
        if reason:
            return None, reason
        scales = published.spread(published.scales)[:, 0]
        return pack_fp8(jnp.asarray(values.T), jnp.asarray(scales)), ""
    if values.dtype.kind not in "iu":
        return None, _obstacle("a value", group, whole=whole, moved=moved, zeros=False)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    narrow = -INT4.largest - 1 <= low and high <= INT4.largest
    zeros = low < -INT8.largest - 1 or high > INT8.largest or (not narrow and not whole)
    name = "int4" if narrow else "int8"
    reason = _obstacle(name, group, whole=whole, moved=moved, zeros=zeros)
    if reason:
        return None, reason
    columns = jnp.asarray(values.astype(np.int8).T)
    if not narrow or (whole and published.values.dtype == np.int8):
        return pack_int8(columns, jnp.asarray(published.spread(published.scales)[:, 0])), ""
    return pack_int4(columns, jnp.asarray(_by_lanes(published))), ""


def _by_lanes(published: PublishedWeight) -> np.ndarray:
    """Scales (groups, outputs) for every 128 inputs, padding included."""
    rows = -(-published.values.shape[1] // INT4_GROUP)
    firsts = np.arange(rows) * INT4_GROUP // published.block[1]
    tall = np.repeat(published.scales, published.block[0], axis=0)[: published.values.shape[0]]
    return tall[:, firsts].T.astype(np.float32)
