"""`StepVariant`: the implementation of a training step; `StepSplit`: its time by cause.

Steps differ in the attention kernel and in what they round to 8 bits. Weights are rounded where
they are stored, and cross the links in 8 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...hardware.formats import BFLOAT16, INT8
from ...hardware.rates import StepRates
from .attention_time import kernel_s, plain_s, splash_in_two_s, splash_s
from .model_shape import LayerShape, ModelShape

# HBM bytes of rounding one value: read for the maximum of its array, read again, written.
ROUNDED_BYTES = 2 * BFLOAT16.itemsize + INT8.itemsize


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What is rounded in addition to the inputs and weights of every forward pass.

    Attributes:
        inputs: How often inputs are rounded again for weight gradients.
        gradients: How often each incoming gradient is rounded.
        input_bytes: HBM bytes of rounding one input value.
        gradient_bytes: HBM bytes of rounding one gradient value.
        weight_gradients: Whether matmuls of weight gradients are 8-bit too.
        experts: Whether matmuls of experts are 8-bit too.
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
        """Return the HBM bytes per token in one layer.

        Args:
            layer: The kind of layer.
            tensor: Devices along `tensor`.
            again: 1 where forward matmuls run again.
            split_sequence: Whether activations as wide as the model are sharded along `tensor` too.
        """
        k = layer
        stream = k.d_model / (tensor if split_sequence else 1)
        # Matmuls of one input share its rounding; rows of experts are rounded for each matmul.
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
        """Return a layer's gathers along `tensor`, in units of bfloat16 ones."""
        narrow = (1 + again + self.inputs) + self.gradients
        return 2 * (narrow / 2 + (0 if self.weight_gradients else 2))


# `int8_matmul` and `float8_matmul` of tpukit.models.matmul.eight_bit; the latter keeps the
# rounded inputs.
OUR_INT8 = Rounding(weight_gradients=False)
OUR_INT8_THROUGHOUT = Rounding(inputs=1, gradients=2)
OUR_FLOAT8 = Rounding()
# tpukit.models.matmul.eight_bit: no maximum of inputs is computed, and gradients are rounded
# once by row and once by column.
OUR_FLOAT8_STATIC = Rounding(
    gradients=2, input_bytes=ROUNDED_BYTES - BFLOAT16.itemsize, experts=True
)
OUR_FLOAT8_CHANNELS = Rounding(gradients=2, experts=True)


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """The implementation of a step; by default tpukit's.

    Attributes:
        attention: tpukit's kernels, jax's splash kernels with one or two backward kernels, or
            scores in HBM.
        split_sequence: Whether the residual stream is sharded along `tensor`.
        int8: What an int8 step rounds.
        fp8: What an fp8 step rounds.
    """

    attention: Literal["ours", "splash", "splash in two", "plain"] = "ours"
    split_sequence: bool = False
    int8: Rounding = OUR_INT8
    fp8: Rounding = OUR_FLOAT8

    @property
    def attention_timer(self) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        """Return the function that gives the seconds of attention's two passes."""
        return _ATTENTION[self.attention]

    def other_flops_per_token(self, shape: ModelShape) -> float:
        """Return FLOPs per token of matmuls other than those with weights of layers and head.

        A one-hot lookup is a matmul, and so is its gradient.
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
    """Return tpukit's step for a model with this `matmul` format."""
    return _VARIANTS.get(matmul, OUR_STEP)


CAUSES = ("matrix", "attention", "hbm", "ici", "dcn", "host", "bubble")


@dataclass(frozen=True)
class StepSplit:
    """Seconds of a step by cause, as arrays (origin: model)."""

    matrix: np.ndarray
    attention: np.ndarray
    hbm: np.ndarray
    ici: np.ndarray
    dcn: np.ndarray
    host: np.ndarray
    bubble: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds of the step."""
        return sum((getattr(self, cause) for cause in CAUSES), np.zeros_like(self.matrix))

    def at(self, index: int) -> dict[str, float]:
        """Return the seconds of one candidate."""
        return {cause: float(getattr(self, cause)[index]) for cause in CAUSES}
