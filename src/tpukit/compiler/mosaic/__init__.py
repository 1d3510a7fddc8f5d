"""Pallas kernels as the compiler is given them: what their programs compute, and how often."""

from .counting import kernel_flops as kernel_flops
from .kernel import Uncountable as Uncountable
