"""How much faster a quantized model runs, where there is an accelerator to time it on."""

import time
from typing import Any

import jax

from ...hardware.figure import Figure
from ..model import QuantizedModel

_ROUNDS = 5


def measured_speedup(model: QuantizedModel, batch: Any) -> Figure:
    """One forward pass of the full model over one of the quantized model's, on this device.

    Missing on a CPU: what it says of a chip's memory and units is nothing.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Figure.missing(
            "×",
            "there is no accelerator here, and a CPU's times say nothing of one; --on v6e "
            "(chip='v6e') estimates it by kernels compiled for that chip",
        )
    full = _seconds(jax.jit(model.subject.apply), model.subject.params, batch)
    quantized = _seconds(jax.jit(model.apply), model.params, batch)
    return Figure(
        full / quantized,
        "×",
        origin="measured",
        source=f"one forward pass of a batch on {device.device_kind}",
        date=time.strftime("%Y-%m-%d"),
    )


def _seconds(function: Any, params: Any, batch: Any) -> float:
    jax.block_until_ready(function(params, batch))
    found: list[float] = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(function(params, batch))
        found.append(time.perf_counter() - started)
    return sorted(found)[_ROUNDS // 2]
