"""A plan as terminal text: verdict, choices with the causes of their time, rejected slices."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...hardware.figure import seconds_text
from ...hardware.mesh_sizes import write_mesh
from ...models.remat.policy import FULL, MINIMAL, NONE
from ..amounts import days_text
from ..cost.step_variant import CAUSES
from ..search.choice import Choice
from ..search.verification import is_compiled

if TYPE_CHECKING:
    from .result import PlanResult, RecordedPlan

    AnyPlan: TypeAlias = PlanResult | RecordedPlan

BAR_WIDTH = 14
COLORS = {
    "matrix": "blue",
    "attention": "magenta",
    "hbm": "cyan",
    "ici": "yellow",
    "dcn": "red",
    "host": "green",
    "bubble": "bright_black",
}
# Bars use one letter per cause, so that they can be read without colors.
LETTERS = {
    "matrix": "M",
    "attention": "A",
    "hbm": "H",
    "ici": "I",
    "dcn": "D",
    "host": "O",
    "bubble": "-",
}
REJECTED_SHOWN = 8
_REMAT_WORDS = {
    "save=qkv_proj,attention,out_proj,mlpwi": "keep products, attention",
    MINIMAL: "keep products",
    "save=attention": "keep attention",
    FULL: "keep inputs",
    "offload=decoder_layer_input": "offload inputs",
    NONE: "keep all",
}
_MOMENT_WORDS = {"float32": [], "bfloat16": ["mu bf16"], "int8": ["moments int8"]}


def plan_report(result: "PlanResult") -> Group:
    """Return the whole answer."""
    parts: list[RenderableType] = [verdict_line(result)]
    if result.choices:
        parts.append(_choices(result, result.choices))
        parts.append(_legend())
    if result.unpriced:
        parts.append(Text("\nNo price is known for these; by chip-hours:", style="bold"))
        parts.append(_choices(result, result.unpriced))
    if len(result.front) > 1:
        words = f"\nNothing is both faster and cheaper than{front_words(result)}:"
        parts += [Text(words, style="bold"), _front(result)]
    if result.rejected:
        parts.append(Text("\nLeft out:", style="bold"))
        parts += [
            Text.assemble(("  ", ""), (f"{one.what}: ", "yellow"), one.reason)
            for one in result.rejected[:REJECTED_SHOWN]
        ]
        hidden = len(result.rejected) - REJECTED_SHOWN
        parts += [Text(f"  and {hidden} more; --json has all.")] if hidden > 0 else []
    if result.extrapolations:
        parts.append(Text("\nFaster than anyone has published:", style="bold"))
        parts += [Text(f"  {line}", style="yellow") for line in result.extrapolations]
    if result.disagreements:
        parts.append(Text("\nWhat the compiler says otherwise:", style="bold"))
        parts += [Text(f"  {note}", style="yellow") for note in result.disagreements]
    parts.append(Text("\nAssumed:", style="bold"))
    parts += [Text(f"  {line}", style="dim") for line in result.assumptions]
    if result.next_command:
        needs_file = result.job_file is None and result.next_command.endswith(".yaml")
        before = "the same with -o job.yaml, then " if needs_file else ""
        parts.append(Text.assemble(("\nNext: ", "bold"), before, result.next_command))
    return Group(*parts)


def verdict_line(result: "PlanResult") -> Text:
    """Return the verdict as one line."""
    word, words = verdict_words(result)
    color = "green" if result.feasible else "yellow" if result.best else "red"
    return Text.assemble((f"{word} ", f"bold {color}"), words)


def verdict_words(result: "AnyPlan") -> tuple[str, str]:
    """Return the verdict as a word and a sentence."""
    best = result.best
    if best is None:
        return "NO PLAN", f"{result.shortfall}."
    verified = best.verified is not None and best.verified.memory_bytes is not None
    origin = "compiler-verified" if verified else "by the model"
    words = (
        f"{best.slice} ({chips_text(best)}), {write_mesh(best.mesh)}: "
        f"{days_text(best.days)}, {money_text(best)}, "
        f"{best.tokens_per_s_per_chip:,.0f} tokens/s/chip"
        f"{mfu_text(best)}, {origin}."
    )
    if result.feasible:
        return result.headline, words
    return "NOT AS ASKED", f"{result.shortfall}. Nearest: {words}"


def _choices(result: "PlanResult", choices: Sequence[Choice]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("slice", no_wrap=True)
    table.add_column("how")
    table.add_column("step", no_wrap=True, min_width=BAR_WIDTH)
    for title in ("HBM", "time", "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    spot = any(choice.waste for choice in choices)
    if spot:
        table.add_column("waste", justify="right", no_wrap=True)
    for choice in choices:
        row: list[RenderableType] = [
            f"{choice.slice}\n{chips_text(choice)}",
            f"{write_mesh(choice.mesh)}\nbatch {batch_text(choice)}, {remat_text(choice)}",
            Group(Text(seconds_text(choice.step_time_s)), split_bar(choice)),
            f"{choice.memory_bytes / choice.usable_bytes:.0%}\n{choice.hbm.origin}",
            f"{days_text(choice.days)}\n",
            f"{money_text(choice)}\n{price_text(choice)}",
        ]
        table.add_row(*row, *([f"{choice.waste:.1%}\n"] if spot else []))
    return table


def _front(result: "PlanResult") -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for choice in result.front:
        table.add_row(
            f"  {choice.slice}",
            days_text(choice.days),
            money_text(choice),
            write_mesh(choice.mesh),
            "compiled" if is_compiled(choice) else "",
        )
    return table


def front_words(result: "AnyPlan") -> str:
    """Return a note on the correction of slices that were not compiled; "" if there is none."""
    ratio = max((one.correction for one in result.front), key=lambda r: abs(r - 1.0))
    if ratio == 1.0:
        return ""
    return f" (not compiled: the model times {ratio:.3g}, by those that were)"


def _legend() -> Text:
    legend = Text()
    for cause in CAUSES:
        legend.append(LETTERS[cause], style=f"{COLORS[cause]} reverse").append(f" {cause}  ")
    return legend


def split_bar(choice: Choice) -> Text:
    """Draw the causes of a step's time, from the model, as one bar."""
    total = sum(choice.seconds_by_cause.values()) or 1.0
    bar = Text()
    reached = drawn = 0.0
    for cause in CAUSES:
        reached += choice.seconds_by_cause[cause] / total * BAR_WIDTH
        width = round(reached) - round(drawn)
        bar.append(LETTERS[cause] * width, style=f"{COLORS[cause]} reverse")
        drawn = reached
    return bar


def mfu_text(choice: Choice) -> str:
    """Return the MFU with its peak, and whether a published step reached as much."""
    if choice.mfu is None:
        return ""
    beyond = " (more than any published step)" if choice.extrapolates else ""
    return f", MFU {choice.mfu:.1%} of {choice.mfu_peak} peak{beyond}"


def chips_text(choice: Choice) -> str:
    """Return the number of chips as text."""
    count = choice.slice.chips
    return f"{count:,} chip{'s' if count > 1 else ''}"


def batch_text(choice: Choice) -> str:
    """Return the examples of a step and its microbatches."""
    count = choice.job.microbatches
    pieces = f" in {count}" if count > 1 else ""
    return f"{choice.batch_size:,}{pieces}"


def remat_text(choice: Choice) -> str:
    """Return the remat policy and other settings that differ from the defaults."""
    words = [_REMAT_WORDS.get(choice.remat, choice.remat)]
    train = choice.job.train
    words += [train.optimizer] if train.optimizer != "adamw" else []
    words += _MOMENT_WORDS[train.moment_dtype]
    words += [choice.precision] if choice.precision != "bf16" else []
    return ", ".join(words)


def money_text(choice: Choice) -> str:
    """Return dollars, or chip-hours if no price is known."""
    if math.isinf(choice.days):
        return "–"
    if choice.usd.value is None:
        hours = choice.chip_hours
        return f"{hours:,.0f} chip-h" if hours >= 100 else f"{hours:.3g} chip-h"
    return f"${choice.usd.value:,.{0 if choice.usd.value >= 100 else 2}f}"


def price_text(choice: Choice) -> str:
    """Return the price of a chip-hour."""
    price = choice.usd_per_chip_hour.value
    if price is None:
        return "no price"
    return f"${price:.4g}/chip-h"
