"""Numbers as a person reads them, the same in every report."""

from ...hardware.figure import format_quantity

_STEPS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6), (1e-9, "ns", 1e9))
_FAST = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


def seconds_text(seconds: float) -> str:
    """1.202 s, 26.5 ms, 412 µs."""
    for least, unit, factor in _STEPS:
        if abs(seconds) >= least * 0.9995:
            return f"{seconds * factor:.4g} {unit}"
    return "0 s" if not seconds else f"{seconds:.2g} s"


def bytes_text(amount: float) -> str:
    """21.3 GiB."""
    return format_quantity(amount, "B")


def flops_text(amount: float) -> str:
    """3.299 TFLOP."""
    for least, unit in _FAST:
        if amount >= least:
            return f"{amount / least:.4g} {unit}"
    return f"{amount:.4g} FLOP"
