"""The RMS-norm op: rows with a float32 scale, as training keeps them."""

from functools import partial

from ...row_norm.op import norm_case, row_norm_op
from . import reference
from .api import OP_NAME, PASSES, rms_norm

case = partial(norm_case, lines=1)
OP = row_norm_op(OP_NAME, rms_norm, reference.rms_norm, PASSES, lines=1)
