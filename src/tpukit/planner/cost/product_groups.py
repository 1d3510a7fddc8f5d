"""The products with weights of a step, in groups of one width: FLOPs, shares of peak, formats."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...hardware import formats
from .kept import Kept
from .layer_shape import LANES, LayerShape, in_tiles
from .model_shape import ModelShape
from .rates import Rates

# The kernels' usual tile of rows (kernels.grouped_matmul): each further expert shares one.
GROUPED_TILE_ROWS = 512
BFLOAT16 = formats.BFLOAT16.itemsize  # bytes of a value


@dataclass(frozen=True)
class ProductGroup:
    """Products of one token and forward pass, over all layers a device holds.

    Attributes:
        flops: Of the token, widths filled up to whole lanes.
        again: The share that runs again in the backward pass, by remat policy.
        share: Of the peak.
        of_experts: Whether they are experts'.
        in_layers: Whether they are in a layer, and so may have fewer bits.
    """

    flops: np.ndarray
    again: list[float]
    share: np.ndarray
    of_experts: bool = False
    in_layers: bool = True


@dataclass(frozen=True)
class ProductGroups:
    """The groups of a model on every candidate.

    Attributes:
        sizes: Devices along each axis.
        tokens: Of one device and micro-batch.
        kept: What each remat policy keeps.
    """

    shape: ModelShape
    rates: Rates
    sizes: Mapping[str, np.ndarray]
    tokens: np.ndarray
    kept: list[Kept]

    def __iter__(self) -> Iterator[ProductGroup]:
        s, tensor = self.shape, self.sizes["tensor"]
        for layer in s.kinds:
            yield from self._of_layer(layer)
        # Only the last stage has the head; every stage waits for it.
        yield ProductGroup(
            2 * s.unembeddings * s.d_model * s.vocab * _padding(s.vocab / tensor) / tensor,
            [0.0 for _ in self.kept],
            self._share(s.d_model * s.vocab / tensor),
            in_layers=False,
        )

    def _of_layer(self, layer: LayerShape) -> Iterator[ProductGroup]:
        k, tensor = layer, self.sizes["tensor"]
        layers = k.count / self.sizes["stage"]
        again = [kept.recomputed_weights(k) for kept in self.kept]
        yield ProductGroup(
            2 * k.mixing_weights * _padding(k.out_width / tensor) / tensor * layers,
            [mixing / k.mixing_weights for mixing, _, _ in again],
            self._share(k.d_model * k.out_width / tensor),
        )
        if k.dense_width:
            dense = k.hidden_matrices * k.d_model * k.dense_width
            yield ProductGroup(
                2 * dense * _padding(k.dense_width / tensor) / tensor * layers,
                [inner / dense for _, inner, _ in again],
                self._share(k.d_model * k.dense_width / tensor),
            )
        if k.experts:
            # Experts work on their own share of the rows, each with its own weights; rows sorted
            # by expert are multiplied by kernels whose operands stay in no memory.
            chosen = k.hidden_matrices * k.d_model * k.chosen_width
            plain = self._share(k.d_model * k.expert_width / tensor)
            padding = _padding(k.expert_width / tensor)
            yield ProductGroup(
                2 * chosen * self._expert_rows(k) * padding / tensor * layers,
                [inner / chosen for _, _, inner in again],
                self.rates.streamed_share if k.sorted_rows else plain,
                of_experts=True,
            )

    def _expert_rows(self, layer: LayerShape) -> np.ndarray:
        """Rows that are multiplied over those routed: buffers have room, tiles have two experts."""
        if not layer.sorted_rows:
            return np.full(len(self.tokens), layer.expert_rows)
        further = layer.experts / self.sizes["expert"] - 1
        return 1 + further * GROUPED_TILE_ROWS / (self.tokens * layer.experts_per_token)

    def _share(self, weights: np.ndarray) -> np.ndarray:
        """Of peak: less when neither rows nor weights can stay in VMEM."""
        r = self.rates
        smaller = np.minimum(self.tokens * self.shape.d_model, weights) * BFLOAT16
        return np.where(smaller > r.resident_bytes, r.streamed_share, r.matrix_share)


def _padding(width: np.ndarray) -> np.ndarray:
    """What a width grows by when filled up to whole lanes."""
    return in_tiles(width, LANES) / width
