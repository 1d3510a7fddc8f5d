"""`tpukit quantize --verdict`: what chips make of a checkpoint that was published quantized."""

from pathlib import Path


def show_verdict(source: Path, on: str | None, batch: int, context: int, *, json: bool) -> None:
    """Say of each chip whether it multiplies the checkpoint as it is, and the way out."""
    from ..planner.published_verdict import CHIPS, quantization_verdict
    from .output import show

    chips = [word.strip() for word in on.split(",")] if on else CHIPS
    show(quantization_verdict(source, on=chips, batch=batch, context=context), json=json)
