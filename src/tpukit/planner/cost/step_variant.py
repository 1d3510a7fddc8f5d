"""How a training step is written where its dimensions leave it open, and the causes of its time.

A step may use one attention kernel or another and round more or less to eight bits. Weights are
rounded where they are stored and cross the links in eight bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...hardware.formats import BFLOAT16, INT8
from ...hardware.rates import StepRates
from .attention_time import kernel_s, plain_s, splash_in_two_s, splash_s
from .layer_shape import LayerShape
from .model_shape import ModelShape

# HBM bytes of rounding one value: it is read for the largest of its array, read again, written.
ROUNDED_BYTES = 2 * BFLOAT16.itemsize + INT8.itemsize


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What is rounded beside the inputs and the weights of every forward pass.

    Attributes:
        inputs: Times that inputs are rounded anew for the gradients of weights.
        gradients: Times that each gradient coming back is rounded.
        input_bytes: HBM bytes of rounding a value of an input.
        gradient_bytes: HBM bytes of rounding a value of a gradient.
        weight_gradients: Whether the products that give gradients of weights are narrow too.
        experts: Whether the products of experts are narrow too.
    """

    inputs: int = 0
    gradients: int = 1
    input_bytes: float = ROUNDED_BYTES
    gradient_bytes: float = ROUNDED_BYTES
    weight_gradients: bool = True
    experts: bool = False

    def bytes_per_token(
        self, layer: LayerShape, tensor: np.ndarray, again: np.ndarray, *, split_sequence: bool
    ) -> np.ndarray:
        """HBM bytes of one token in one layer.

        Args:
            layer: Its kind.
            tensor: Devices along `tensor`.
            again: 1 where products of the forward pass run again.
            split_sequence: Whether what is as wide as the model is split along `tensor` too.
        """
        k = layer
        stream = k.d_model / (tensor if split_sequence else 1)
        # Products of one input share its rounding; rows of experts are rounded for each of them.
        blocks = 2 if k.dense_width else 1
        rows = k.experts_per_token * k.expert_rows * k.d_model if self.experts else 0.0
        inner = k.dense_width + (k.chosen_width * k.expert_rows if self.experts else 0.0)
        inputs = blocks * stream + rows + (k.out_width + inner) / tensor
        wider = k.mixing_width + (k.hidden_matrices - 1) * inner
        gradients = self.gradients * (blocks * stream + rows + wider / tensor)
        rounded = inputs * (1 + again + self.inputs) * self.input_bytes
        beside_products = StepRates.of().rounding_beside_products
        return (rounded + gradients * self.gradient_bytes) * beside_products

    def gathers(self, again: np.ndarray) -> np.ndarray:
        """Gathers of a layer's two inputs and two gradients along `tensor`, in bfloat16 ones."""
        narrow = (1 + again + self.inputs) + self.gradients
        return 2 * (narrow / 2 + (0 if self.weight_gradients else 2))


# tpukit.models.products.int8, and tpukit.models.products.float8, which keeps the rounded inputs.
OUR_INT8 = Rounding(weight_gradients=False)
OUR_INT8_THROUGHOUT = Rounding(inputs=1, gradients=2)
OUR_FLOAT8 = Rounding()
# tpukit.models.products.float8_static: no input is read for its largest value, and gradients are
# rounded once by row and once by column.
OUR_FLOAT8_STATIC = Rounding(
    gradients=2, input_bytes=ROUNDED_BYTES - BFLOAT16.itemsize, experts=True
)
OUR_FLOAT8_CHANNELS = Rounding(gradients=2, experts=True)


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """How a step is written where its dimensions leave it open; by default as we write it.

    Attributes:
        attention: As our kernels, jax's splash kernels with one backward kernel or two, or with
            scores that go through HBM.
        split_sequence: Along `tensor` the stream between blocks is split too.
        int8: What a step in int8 rounds.
        fp8: What a step in fp8 rounds.
    """

    attention: Literal["ours", "splash", "splash in two", "plain"] = "ours"
    split_sequence: bool = False
    int8: Rounding = OUR_INT8
    fp8: Rounding = OUR_FLOAT8

    @property
    def attention_timer(self) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        """Seconds of attention's two passes."""
        return _ATTENTION[self.attention]

    def other_flops_per_token(self, shape: ModelShape) -> float:
        """FLOPs of products beside those with weights of layers and head; a program may make more.

        A lookup by a one-hot matrix is a product, and so is its gradient.
        """
        tables = 2 * (2.0 * shape.vocab * shape.d_model) if shape.one_hot_lookup else 0.0
        return tables + 3 * 2.0 * shape.beside_layers


OUR_STEP = StepVariant()
_VARIANTS = {
    "int8_throughout": StepVariant(int8=OUR_INT8_THROUGHOUT),
    "float8_static": StepVariant(fp8=OUR_FLOAT8_STATIC),
    "float8_channels": StepVariant(fp8=OUR_FLOAT8_CHANNELS),
}
_ATTENTION = {
    "ours": kernel_s,
    "splash": splash_s,
    "splash in two": splash_in_two_s,
    "plain": plain_s,
}


def variant_for(matmul: str) -> StepVariant:
    """Our step of a model whose products are in the format `matmul`."""
    return _VARIANTS.get(matmul, OUR_STEP)


CAUSES = ("matrix", "attention", "hbm", "ici", "dcn", "host", "bubble")


@dataclass(frozen=True)
class StepSplit:
    """Seconds of a step by what they are spent on, as arrays (origin: model)."""

    matrix: np.ndarray
    attention: np.ndarray
    hbm: np.ndarray
    ici: np.ndarray
    dcn: np.ndarray
    host: np.ndarray
    bubble: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The step."""
        return sum((getattr(self, cause) for cause in CAUSES), np.zeros_like(self.matrix))

    def at(self, index: int) -> dict[str, float]:
        """The seconds of one candidate."""
        return {cause: float(getattr(self, cause)[index]) for cause in CAUSES}
