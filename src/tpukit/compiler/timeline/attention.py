"""How long splash attention kernels run, from their shapes and measured shares of peak."""

import re
from dataclasses import dataclass

from ..hlo import Computation, Instruction, Shape
from .machine import Machine

# Matrix products of each kernel, as multiples of one (queries x keys x head size) product.
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "dkv fused": 5}
_KERNEL = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")


@dataclass(frozen=True)
class SplashTimer:
    """A `KernelTimer` for jax's splash kernels; it knows no other kernel."""

    machine: Machine

    @staticmethod
    def knows(kernel: Instruction) -> bool:
        """Whether `kernel` is one of them."""
        return _name(kernel) is not None

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call, or None when `kernel` is not a splash kernel."""
        found = _name(kernel)
        if found is None:
            return None
        operands = [parent.by_name[name].shapes[0] for name in kernel.operands]
        queries, keys = [shape for shape in operands if shape.dtype in ("bf16", "f32")][:2]
        kind = found[1]
        if kind == "dkv" and len(kernel.shapes) > 2 and _has_partial_dq(kernel, queries):
            kind = "dkv fused"
        head = queries.dims[-1]
        pairs = (
            queries.elements
            // head
            * keys.dims[-2]
            * _visited_share(operands, queries, keys, by_keys="dkv" in kind)
        )
        flops = _PRODUCTS[kind] * 2.0 * pairs * head
        share = self.machine.attention_share(head)
        if kind != "fwd":
            share *= self.machine.attention.backward_over_forward
        at_peak = flops / self.machine.peak_flops("bf16")
        in_a_step = self.over_measured(kind) * self.machine.op_time_in_a_step / share
        return at_peak * max(1.0, in_a_step)

    def over_measured(self, kind: str) -> float:
        """How much longer the kernel takes than tokamax's, of which the shares were measured."""
        rates = self.machine.attention
        return rates.jax_over_tokamax_forward if kind == "fwd" else rates.jax_over_tokamax_backward


def _name(kernel: Instruction) -> re.Match[str] | None:
    return _KERNEL.search(kernel.name) or _KERNEL.search(kernel.op_name)


def _has_partial_dq(kernel: Instruction, queries: Shape) -> bool:
    """A fused backward kernel also writes dq, once per block of keys."""
    return any(shape.elements >= queries.elements for shape in kernel.shapes)


def _visited_share(operands: list[Shape], queries: Shape, keys: Shape, *, by_keys: bool) -> float:
    """The share of (query, key) blocks the kernel visits.

    Its first operands tabulate the grid of blocks. A causal mask keeps the whole grid and skips
    what is above the diagonal; a window shrinks the grid to what a block of queries sees, or in a
    kernel that goes by keys, to what sees a block of keys. Blocks of both are taken as equal.
    """
    tables = [shape for shape in operands if shape.dtype in ("s8", "s32", "s16")]
    grid = next((shape.dims[-2:] for shape in tables if len(shape.dims) >= 3), None)
    if grid is None:
        return 0.5
    whole, visited = reversed(grid) if by_keys else grid
    lengths = (keys.dims[-2], queries.dims[-2]) if by_keys else (queries.dims[-2], keys.dims[-2])
    seen = visited * lengths[0] / whole
    if whole == visited or seen >= lengths[1]:
        n = max(grid)
        return (n + 1) / (2 * n)
    return seen / lengths[1]
