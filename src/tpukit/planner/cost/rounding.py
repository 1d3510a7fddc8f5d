"""How a training step in eight bits is written: what it rounds, how often, and what stays wide.

Weights are rounded where they are stored and cross the links in eight bits.
"""

from dataclasses import dataclass

import numpy as np

from ...hardware.formats import BFLOAT16, INT8
from ...hardware.rates import StepRates
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
    """

    inputs: int = 0
    gradients: int = 1
    input_bytes: float = ROUNDED_BYTES
    gradient_bytes: float = ROUNDED_BYTES
    weight_gradients: bool = True

    def bytes_per_token(
        self, shape: ModelShape, tensor: np.ndarray, again: np.ndarray, *, split_sequence: bool
    ) -> np.ndarray:
        """HBM bytes of one token in one layer.

        Args:
            shape: The model.
            tensor: Devices along `tensor`.
            again: 1 where products of the forward pass run again.
            split_sequence: Whether what is as wide as the model is split along `tensor` too.
        """
        s = shape
        stream = s.d_model / (tensor if split_sequence else 1)
        # Products of one input share its rounding. Those of experts are not narrow.
        inner = 0 if s.experts else s.d_ff
        blocks = 1 if s.experts else 2
        inputs = blocks * stream + (s.heads * s.head_dim + inner) / tensor
        wider = s.attention_width + (s.hidden_matrices - 1) * inner
        gradients = self.gradients * (blocks * stream + wider / tensor)
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
