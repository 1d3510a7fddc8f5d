"""`DecodingCheck`: the compiler's result for prefill and decode."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...compiler.memory.view import memory_details, verdict_line
from ...exit_codes import ExitCode
from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...hardware.mesh_sizes import write_mesh
from ...shown import Shown
from ..result import CheckResult


@dataclass(frozen=True, kw_only=True)
class DecodingCheck(Shown):
    """The compiler's result for the two programs that `generate` runs.

    Attributes:
        model: The model's name.
        slice: The slice.
        mesh: Devices by axis.
        batch_size: Sequences that were requested.
        rows: Sequences that decode has memory for, equally many per device.
        prefill_rows: Prompts per prefill.
        prompt: Tokens per prompt.
        context: Tokens that each sequence can grow to, which is the size of the caches.
        weights: The format of parameters.
        prefill: The check of the program that reads prompts and samples the first token of each.
        decode: The check of the loop that adds tokens; its prediction is for one iteration, one
            token per sequence.
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
    origin = "model"
    _facts = (
        "model slice=slice.name mesh batch_size rows prefill_rows prompt context weights fits "
        "prefill_s token_s tokens_per_s origin advice prefill decode"
    )

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted both programs."""
        return self.prefill.fits and self.decode.fits

    @property
    def exit_code(self) -> int:
        """0 when both fit, 3 when one does not."""
        return ExitCode.DONE if self.fits else ExitCode.DOES_NOT_FIT

    @property
    def prefill_s(self) -> float | None:
        """Predicted seconds until all prompts are read; None without a prediction."""
        return _seconds(self.prefill)

    @property
    def token_s(self) -> float | None:
        """Predicted seconds for one more token of every sequence; None without a prediction."""
        return _seconds(self.decode)

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted new tokens per second of all sequences; None without a prediction."""
        return None if self.token_s is None else self.batch_size / self.token_s

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on making it fit, from arithmetic on decode's memory report."""
        return () if self.fits else tuple(self._advice())

    def _advice(self) -> Iterator[str]:
        memory = self.decode.memory
        room, purposes = memory.usable_bytes, memory.purposes
        fixed = sum(purposes.get(name, 0) for name in ("parameters", "weight copies"))
        if not self.decode.fits and room is not None and fixed < room:
            # Caches, their padding and activations all grow with the rows.
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

    def headline(self) -> str:
        """One line on the model, slice and formats that were compiled."""
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
