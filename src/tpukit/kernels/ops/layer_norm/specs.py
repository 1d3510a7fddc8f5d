"""The layer-norm op: rows with float32 scale and bias, as training keeps them."""

from functools import partial

from ..rms_norm.specs import norm_case, row_norm_op
from . import reference
from .api import OP_NAME, PASSES, SPLITS, layer_norm

case = partial(norm_case, lines=2)
OP = row_norm_op(OP_NAME, layer_norm, reference.layer_norm, PASSES, SPLITS, lines=2)
