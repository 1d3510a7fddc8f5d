"""What is trained beside a model that stays as it is (LoRA), as plain numbers.

The model's own weights have no gradients and no moments, and lie there as they are kept: in
bfloat16, or quantized and decoded for each product. Thin matrices are cut along `fsdp`, and
gathered for a layer with its weights.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...hardware import formats
from ...models.lora.spec import LoraSpec
from ...models.lora.targets import targets_of, thin_products, thin_shapes
from ...models.transformer.config import TransformerConfig
from .layer_shape import LANES, in_tiles
from .matrices import layer_matrices

BFLOAT16 = formats.BFLOAT16.itemsize  # bytes of a value


@dataclass(frozen=True, kw_only=True)
class ThinShape:
    """Thin matrices, and the weights beside them.

    Attributes:
        parameters: Numbers of all thin matrices.
        parameter_shapes: Of each, layers stacked.
        products: Multiply-adds of one token with them, filled up to whole lanes.
        channels: Of one token, those that thin products read and those that they are added to, over
            all layers.
        base: The format of the model's own matrices, in words.
        base_bytes: Bytes of all its weights but experts, tables included.
        expert_bytes: The same of experts.
        largest: Weights of the largest matrix: one is decoded at a time.
        stored: Whether matrices are quantized: they are decoded for every product.
        hidden_kept: Hidden widths of a token that wait in the backward pass of a layer, more than
            where all is trained: gradients of thin matrices read their inputs, those of the others
            do not. Read off compiled steps (`benchmarks/memory_estimate.py --lora`).
        sums_experts: Whether experts get thin matrices: they are added to theirs, and the sum has a
            gradient as large as they are.
    """

    parameters: int
    parameter_shapes: tuple[tuple[int, ...], ...] = field(repr=False)
    products: float
    channels: float
    base: str
    base_bytes: float
    expert_bytes: float
    largest: int
    stored: bool
    hidden_kept: int
    sums_experts: bool

    @property
    def kept_bytes(self) -> float:
        """Bytes of all of the model's own weights."""
        return self.base_bytes + self.expert_bytes

    @property
    def decoded_bytes(self) -> float:
        """Bytes of the matrix that is being decoded."""
        return float(self.largest * BFLOAT16) if self.stored else 0.0


def thin_shape(
    config: TransformerConfig, spec: LoraSpec, *, stored_bytes: int | None = None
) -> ThinShape:
    """The shape of what is trained beside a reference transformer.

    Args:
        config: The model.
        spec: What is trained.
        stored_bytes: Of all its weights, where a quantized folder holds them.

    Raises:
        TPUModelError: A target is in the path of no matrix.
    """
    targets = targets_of(spec, config)
    thin = [one for shape in targets.values() for one in thin_shapes(shape, spec.rank)]
    inside = [
        one
        for kind, count in Counter(config.layer_order).items()
        for one in layer_matrices(config.kinds[kind], config.d_model, count)
    ]
    kept = spec.base or "bf16"
    experts = sum(one.nbytes(kept) for one in inside if one.of_experts)
    layers = sum(one.nbytes(kept) for one in inside)
    counted = sum(one.parameters for one in inside)
    others = config.parameter_count().total - counted
    outside = others * BFLOAT16
    base, stored = kept, spec.base is not None
    if stored_bytes is not None:
        outside = formats.parse_format(config.param_dtype).nbytes(others)
        share = (stored_bytes - outside) / layers
        experts, layers = experts * share, layers * share
        base, stored = f"{8 * layers / counted:.3g} bits a weight, as they are kept", True
    # A product with fewer columns takes as long as with whole lanes.
    padded = in_tiles(spec.rank, LANES) / spec.rank
    return ThinShape(
        parameters=sum(math.prod(shape) for shape in thin),
        parameter_shapes=tuple(thin),
        products=thin_products(spec, config) * padded,
        channels=thin_products(spec, config) / spec.rank,
        base=base,
        base_bytes=outside + layers - experts,
        expert_bytes=experts,
        largest=max(one.rows * one.columns for one in inside),
        stored=stored,
        hidden_kept=_hidden_kept(targets, stored),
        sums_experts=any("/experts/" in path for path in targets),
    )


def _hidden_kept(targets: Iterable[str], stored: bool) -> int:
    if not any("/mlp/" in path for path in targets):
        return -2
    return 0 if stored else 1
