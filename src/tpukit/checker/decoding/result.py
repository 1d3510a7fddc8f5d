"""What the compiler said about prefill and decode, as one object for every kind of report."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...compiler.memory.view import memory_details, verdict_line
from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...hardware.mesh_sizes import write_mesh
from ...shown import Shown
from ..result import DOES_NOT_FIT, FITS, CheckResult


@dataclass(frozen=True, kw_only=True)
class DecodingCheck(Shown):
    """The compiler's verdict on the two programs that `generate` runs.

    Attributes:
        model: The model's name.
        slice: Where it is to run.
        mesh: Devices by axis.
        batch_size: Sequences that were asked for.
        rows: Sequences that decode holds, as many on every device.
        prefill_rows: Prompts that prefill reads at once.
        prompt: Tokens of each of them.
        context: Tokens that each sequence can grow to; what caches have room for.
        weights: The format of parameters.
        prefill: Reads the prompts and chooses the first token of each.
        decode: One token more for every sequence, in a loop on the device; its prediction is that
            of one turn of the loop.
    """

    model: str
    slice: Slice
    mesh: Mapping[str, int]
    batch_size: int
    rows: int
    prefill_rows: int
    prompt: int
    context: int
    weights: str
    prefill: CheckResult
    decode: CheckResult

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted both programs."""
        return self.prefill.fits and self.decode.fits

    @property
    def exit_code(self) -> int:
        """0 when both fit, 3 when one does not."""
        return FITS if self.fits else DOES_NOT_FIT

    @property
    def prefill_s(self) -> float | None:
        """Seconds until all prompts are read (origin `model`); None where it is not known."""
        return _seconds(self.prefill)

    @property
    def token_s(self) -> float | None:
        """Seconds in which every sequence gets one more token (origin `model`)."""
        return _seconds(self.decode)

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens a second of all sequences that were asked for (origin `model`)."""
        return None if self.token_s is None else self.batch_size / self.token_s

    @property
    def advice(self) -> tuple[str, ...]:
        """What could make it fit, by plain arithmetic on the report of decode."""
        return () if self.fits else tuple(self._advice())

    def _advice(self) -> Iterator[str]:
        memory = self.decode.memory
        room, purposes = memory.usable_bytes, memory.purposes
        fixed = sum(purposes.get(name, 0) for name in ("parameters", "weight copies"))
        if not self.decode.fits and room is not None and fixed < room:
            # Caches, their padding and what is computed all grow with the rows.
            rows = int(self.rows * (room - fixed) / (memory.total_bytes - fixed))
            if 0 < rows < self.rows:
                yield f"--batch-size {rows}: by its share of what is not weights"
        weights = purposes.get("parameters", 0)
        if room is not None and weights > room // 2:
            yield (
                f"weights take {format_quantity(weights, 'B')} of a device: a larger tensor axis, "
                "an expert axis, or a larger slice splits them further"
            )
        if not self.prefill.fits and self.decode.fits:
            yield "only reading all prompts at once does not fit: read fewer of them at a time"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `prefill` and `decode` are reports that `tpukit report` reads."""
        return {
            "model": self.model,
            "slice": str(self.slice),
            "mesh": dict(self.mesh),
            "batch_size": self.batch_size,
            "rows": self.rows,
            "prefill_rows": self.prefill_rows,
            "prompt": self.prompt,
            "context": self.context,
            "weights": self.weights,
            "fits": self.fits,
            "prefill_s": self.prefill_s,
            "token_s": self.token_s,
            "tokens_per_s": self.tokens_per_s,
            "origin": "model",
            "advice": list(self.advice),
            "prefill": self.prefill.to_dict(),
            "decode": self.decode.to_dict(),
        }

    def headline(self) -> str:
        """What was compiled."""
        sequences = "1 sequence" if self.batch_size == 1 else f"{self.batch_size:,} sequences"
        filled = "" if self.rows == self.batch_size else f" (filled up to {self.rows:,})"
        return (
            f"{self.model} in {self.weights} on {self.slice}, {write_mesh(self.mesh)}: "
            f"{sequences}{filled} of {self.context:,} tokens"
        )

    def __rich__(self) -> Group:
        table = Table("program", "HBM of a device (compiler)", "time (model)", "tokens/s (model)")
        table.title = self.headline()
        first = f"prefill, {self.prefill_rows:,} x {self.prompt:,} tokens"
        table.add_row(first, *_row(self.prefill, self.prefill_rows * self.prompt))
        table.add_row("decode, a token each", *_row(self.decode, self.batch_size))
        parts: list[Any] = [table]
        for name, one in (("prefill", self.prefill), ("decode", self.decode)):
            parts += ["", Text.assemble((f"{name} ", "bold"), verdict_line(one.memory))]
            parts += [memory_details(one.memory)]
            parts += [one.prediction or Text(f"no time: {one.no_prediction}", style="dim")]
        if self.advice:
            parts += ["", Text("what could make it fit", style="bold"), *self.advice]
        return Group(*parts)


def _seconds(one: CheckResult) -> float | None:
    return None if one.prediction is None else one.prediction.step_time_s


def _row(one: CheckResult, tokens: int) -> tuple[str, str, str]:
    seconds, memory = _seconds(one), one.memory
    verdict = "fits" if one.fits else "does not fit"
    size = f"{format_quantity(memory.total_bytes, 'B')}, {verdict}"
    if seconds is None:
        return size, "–", "–"
    return size, f"{seconds * 1e3:,.2f} ms", f"{tokens / seconds:,.0f}"
