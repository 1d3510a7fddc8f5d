"""The matrices of a model's layers: their sizes, how often they are there, and their bytes."""

from dataclasses import dataclass

from ...hardware.stored_formats import WEIGHT_FORMATS
from ...models.transformer.layer_config import LayerConfig
from ...models.transformer.shapes import layer_shapes

_WIDE = ("router", "shared_gate")  # small, and what they decide is worth every bit


@dataclass(frozen=True)
class Matrices:
    """Weights of one kind: `count` matrices that rows of width `rows` are multiplied with.

    Attributes:
        used: Of these matrices, the share that one row is multiplied with: less than 1 of experts.
        narrow: Whether they may be kept in fewer bits than bfloat16 has.
    """

    rows: int
    columns: int
    count: int
    used: float = 1.0
    narrow: bool = True

    @property
    def of_experts(self) -> bool:
        """Whether a row is multiplied with some of them only."""
        return self.used < 1

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.rows * self.columns * self.count

    def nbytes(self, weights: str) -> int:
        """Bytes of all of them in a weight format."""
        format = WEIGHT_FORMATS[weights if self.narrow else "bf16"]
        return self.count * format.nbytes(self.rows, self.columns)

    def bytes_read(self, weights: str, rows: int) -> float:
        """Bytes that a pass over `rows` tokens reads: of experts those that some row chooses."""
        return self.nbytes(weights) * (1 - (1 - self.used) ** rows)

    @property
    def products(self) -> float:
        """Multiply-adds of one row."""
        return self.parameters * self.used


def layer_matrices(layer: LayerConfig, d_model: int, layers: int) -> tuple[Matrices, ...]:
    """The matrices of so many layers of a kind."""
    found: list[Matrices] = []
    for path, shape in layer_shapes(layer, d_model).items():
        if "/experts/" in path and len(shape) == 3:
            used = layer.experts_per_token / layer.n_experts
            found.append(Matrices(shape[1], shape[2], shape[0] * layers, used))
        elif path.endswith("/kernel") and not path.endswith("_conv/kernel"):
            narrow = not any(name in path for name in _WIDE)
            found.append(Matrices(shape[0], shape[1], layers, narrow=narrow))
    return tuple(found)
