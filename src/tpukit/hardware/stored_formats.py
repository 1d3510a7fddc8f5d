"""How weights and moments are kept between steps: narrow values, and the scales they share.

Sizes follow from the definition: int4 with a float32 scale for every 128 values takes
4 + 32 / 128 = 4.25 bits a value.
"""

from dataclasses import dataclass

from .formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT32, INT4, INT8, UINT8, NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """Values in lines, along which they share scales: the columns of a weight (K, N), say.

    Attributes:
        values: Of what is stored for each value, or for each group that has one code.
        scales: Of the scales; None where values have none.
        block: Neighbours in a line that share a scale; None for the whole line.
        padded_to: A line is filled up to a multiple of so many values.
        group: Neighbours in a line that one code stands for, an entry of a codebook.
        stages: Codes of a group, whose entries are added up.
        entries: Of the codebook of each stage; every entry is `group` values of int8.
    """

    values: NumberFormat
    scales: NumberFormat | None = None
    block: int | None = None
    padded_to: int = 1
    group: int = 1
    stages: int = 1
    entries: int = 0

    def nbytes(self, length: int, lines: int = 1) -> int:
        """Bytes of one array of `lines` lines with `length` values each."""
        padded = -(-length // self.padded_to) * self.padded_to
        codes = self.stages * (padded // self.group) * lines
        codebook = INT8.nbytes(self.stages * self.entries * self.group)
        return self.values.nbytes(codes) + self._scale_bytes(padded, lines) + codebook

    def _scale_bytes(self, length: int, lines: int) -> int:
        if self.scales is None:
            return 0
        blocks = -(-length // (self.block or length)) if length else 0
        return self.scales.nbytes(blocks * lines)

    def bits_per_value(self, length: int, lines: int = 1) -> float:
        """Bits for each value of such an array, scales, padding and codebook included."""
        return 8 * self.nbytes(length, lines) / (length * lines)


# As `kernels.quantized_matmul` keeps a (K, N) weight. Its kernels cut K by 128 lanes.
_LANES = 128
WEIGHT_FORMATS: dict[str, StoredFormat] = {
    "bf16": StoredFormat(values=BFLOAT16),
    "int8": StoredFormat(values=INT8, scales=FLOAT32, padded_to=_LANES),
    "fp8": StoredFormat(values=FLOAT8_E4M3FN, scales=FLOAT32, padded_to=_LANES),
    "int4": StoredFormat(values=INT4, scales=FLOAT32, block=128, padded_to=_LANES),
    "vq": StoredFormat(values=UINT8, scales=FLOAT32, padded_to=_LANES, group=4, entries=128),
}

# The two moments of Adam by the name of the first one's format, as `OptimizerSpec` takes it.
# The second needs the range of float32, or in eight bits a scale for every few of its numbers.
MOMENT_FORMATS: dict[str, tuple[StoredFormat, StoredFormat]] = {
    "float32": (StoredFormat(values=FLOAT32), StoredFormat(values=FLOAT32)),
    "bfloat16": (StoredFormat(values=BFLOAT16), StoredFormat(values=FLOAT32)),
    "int8": (
        StoredFormat(values=INT8, scales=FLOAT32, block=256),
        StoredFormat(values=UINT8, scales=FLOAT32, block=256),
    ),
}
