"""Bytes of HBM that layer norm and RMS norm move, fused and as XLA makes them, by generation.

The floor is each row read once and written once (backward: row and cotangent read, gradient
written). Ours is counted by following the compiled kernel's own transfers, XLA's from the operands
and results of its scheduled program. Target: at most 1.1 times the floor.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
from claims import Claim, report

import tpukit
from tpukit.kernels.registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op

CHIPS = ("v5e", "v5p", "v6e", "7x")
TARGET = 1.1
ROWS, WIDTH = 8192, 4096


def pulled_back(op: Op, implementation: str) -> Callable[..., Any]:
    """The backward pass alone: gradients for a cotangent that is given as the last argument."""

    def backward(*arrays: Any) -> Any:
        function = op.implementations[implementation]
        _, pull = jax.vjp(lambda *given: function(*given), *arrays[:-1])
        return pull(arrays[-1])

    return backward


def moved_bytes(function: Callable[..., Any], case: KernelCase, chip: str) -> float:
    """What one call moves between HBM and the core."""
    from tpukit.compiler.timeline.work import work_of
    from tpukit.kernels.timing.profile import profile_kernel

    profile = profile_kernel(function, case.arguments, chip)
    if profile.reasons:
        raise SystemExit(f"{chip}: {'; '.join(profile.reasons.values())}")
    module = profile.compiled.module
    return sum(
        profile.calls[one.name].hbm_bytes
        if one.name in profile.calls
        else work_of(one, module.entry, module).hbm_bytes
        for one in module.entry
    )


def main() -> int:
    """Print a line for each op, direction and generation; 1 when a target is missed."""
    tpukit.configure_tpu_environment()
    from tpukit.kernels.ops.layer_norm import specs as layer_norm
    from tpukit.kernels.ops.rms_norm import specs as rms_norm

    claims = []
    for specs in (layer_norm, rms_norm):
        op, case = specs.OP, specs.case(ROWS, WIDTH)
        x = case.arguments[0]
        with_cotangent = KernelCase(case.name, (*case.arguments, x))
        x_bytes = x.size * x.dtype.itemsize
        for direction in ("forward", "backward"):
            for chip in CHIPS:
                moved = {}
                for name in (PALLAS_TPU, REFERENCE):
                    forward = direction == "forward"
                    function = op.implementations[name] if forward else pulled_back(op, name)
                    moved[name] = moved_bytes(function, case if forward else with_cotangent, chip)
                floor = x_bytes * (2 if direction == "forward" else 3)
                what = f"{op.name} {direction} {chip}"
                claims += [
                    Claim(what, moved[PALLAS_TPU] / floor, "x floor", at_most=TARGET),
                    Claim(f"{what}, XLA", moved[REFERENCE] / floor, "x floor"),
                ]
    report(*claims)
    return int(any(claim.at_most and claim.value > claim.at_most for claim in claims))


if __name__ == "__main__":
    sys.exit(main())
