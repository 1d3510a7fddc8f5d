"""Matmuls with weights of a step, grouped by width: FLOPs, shares of peak, formats."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...hardware import formats
from .kept import Kept
from .model_shape import LANES, LayerShape, ModelShape, in_tiles
from .rates import Rates

# The kernels' usual row tile (kernels.grouped_matmul); each further expert shares one.
GROUPED_TILE_ROWS = 512
BFLOAT16 = formats.BFLOAT16.itemsize  # bytes of a value


@dataclass(frozen=True)
class ProductGroup:
    """Matmuls of one token in the forward pass, over all layers of a device.

    Attributes:
        flops: FLOPs per token, with widths padded to whole lanes.
        again: Share that is recomputed in the backward pass, by remat policy.
        share: Share of peak that they reach.
        of_experts: Whether they belong to experts.
        in_layers: Whether they are in a layer, where 8-bit formats apply.
    """

    flops: np.ndarray
    again: list[float]
    share: np.ndarray
    of_experts: bool = False
    in_layers: bool = True


@dataclass(frozen=True)
class ProductGroups:
    """The matmul groups of a model on every candidate.

    Attributes:
        sizes: Devices along each axis.
        tokens: Tokens per device and microbatch.
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
        # Only the last stage has the head, but every stage waits for it.
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
            # Experts compute their own share of the rows with their own weights. Rows sorted by
            # expert are multiplied by kernels whose operands are not kept in VMEM.
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
        """Return computed rows divided by routed rows; buffers and tiles add some."""
        if not layer.sorted_rows:
            return np.full(len(self.tokens), layer.expert_rows)
        further = layer.experts / self.sizes["expert"] - 1
        return 1 + further * GROUPED_TILE_ROWS / (self.tokens * layer.experts_per_token)

    def _share(self, weights: np.ndarray) -> np.ndarray:
        """Return the share of peak, which is lower if neither rows nor weights stay in VMEM."""
        r = self.rates
        smaller = np.minimum(self.tokens * self.shape.d_model, weights) * BFLOAT16
        return np.where(smaller > r.resident_bytes, r.streamed_share, r.matrix_share)


def _padding(width: np.ndarray) -> np.ndarray:
    """Return the factor by which padding to whole lanes enlarges a width."""
    return in_tiles(width, LANES) / width
