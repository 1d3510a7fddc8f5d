"""The run on the screen: step, speed, loss, goodput, and the prediction beside the measurement."""

from collections.abc import Iterator

from rich.text import Text

from ...hardware.missing import Missing
from ..runs.goodput import label_of
from .bars import bar, sparkline
from .snapshot import Snapshot, Training

PROGRESS, LOSSES = 20, 20
NAMED = 3  # causes of lost time that are named


def training_lines(snapshot: Snapshot, *, ascii_only: bool = False) -> Iterator[Text]:
    """Yield the lines of the run's pane; none where there is no run."""
    training = snapshot.training
    if training is None:
        yield _line("no run: `tpukit train` writes one to runs/, or name its folder", style="dim")
        return
    yield Text("")
    for line in _lines(training, ascii_only=ascii_only):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
    # As many lines as it takes.
    for one in training.stragglers.found[:NAMED]:
        yield Text(f"! {one}", style="red")
    for reason, names in _missing(training).items():
        yield Text(f"– {', '.join(names)}: {reason}", style="dim")


def _lines(training: Training, *, ascii_only: bool) -> Iterator[Text]:
    now = training.summary
    dot = " | " if ascii_only else " · "
    style = {"running": "green", "ended": "cyan", "silent": "red"}[now.state]
    first = Text().append(now.name, style="bold").append("  ")
    first.append(now.state_in_words, style=style)
    first.append(f"{dot}step {now.step:,}")
    if now.total_steps:
        first.append(f" of {now.total_steps:,} ")
        first.append(bar_of(now.step / now.total_steps, ascii_only=ascii_only))
    yield first
    loss = Text(f"loss {now.loss:.4f}")
    drawn = sparkline(training.losses, LOSSES, ascii_only=ascii_only)
    loss.append(f" {drawn}" if drawn else "")
    loss.append(f"{dot}{now.speed_in_words}")
    yield loss.append(f"{dot}MFU {now.mfu:.1%}")
    if not isinstance(now.mfu, Missing) and now.mfu_convention:
        yield _line(f"MFU: {now.mfu_convention}", style="dim")
    yield _line(step_text(training, dot))
    saved = "none" if now.checkpoint_step is None else f"step {now.checkpoint_step:,}"
    ago = now.checkpoint_age_s
    age = "" if isinstance(ago, Missing) else f", {clock(ago)} ago"
    yield _line(goodput_text(training))
    yield _line(f"checkpoint {saved}{age}{dot}{training.goodput.lost_steps:,} steps lost so far")


def step_text(training: Training, dot: str) -> str:
    """Return step times, the predicted one beside the measured."""
    now = training.summary
    measured, predicted = now.step_time_p50_s, now.predicted_step_s
    text = f"step {measured:.4g} s p50, {now.step_time_p99_s:.4g} s p99{dot}predicted "
    if isinstance(measured, Missing) or isinstance(predicted, Missing) or not predicted:
        return f"{text}{predicted:.4g}"
    return f"{text}{predicted:.4g} s (measured is {measured / predicted - 1:+.1%})"


def _missing(training: Training) -> dict[str, list[str]]:
    """Return what has no figure, by the reason."""
    now = training.summary
    examples = now.examples_per_s_per_chip
    found: dict[str, list[str]] = {}
    for name, value in {
        "loss": now.loss,
        "tokens/s/chip": now.tokens_per_s_per_chip if isinstance(examples, Missing) else examples,
        "MFU": now.mfu,
        "step": now.step_time_p50_s,
        "prediction": now.predicted_step_s,
        "goodput": now.goodput,
    }.items():
        if isinstance(value, Missing):
            found.setdefault(value.reason, []).append(name)
    return found


def goodput_text(training: Training) -> str:
    """Return goodput and what cost most of the rest."""
    goodput = training.goodput
    if goodput.share is None:
        return "goodput –"
    costs = [
        f"{label_of(cause)} {seconds / goodput.total.wall_s:.1%}"
        for cause, seconds in list(goodput.badput_s.items())[:NAMED]
        if seconds >= 0.001 * goodput.total.wall_s
    ]
    tries = "" if goodput.attempts < 2 else f" over {goodput.attempts} attempts"
    rest = f" ({', '.join(costs)})" if costs else ""
    return f"goodput {goodput.share:.1%}{tries}{rest}"


def bar_of(share: float, *, ascii_only: bool) -> Text:
    """Return a bar of progress, which is neither good nor bad when full."""
    drawn = bar(0.0, PROGRESS, ascii_only=ascii_only).plain
    full = round(min(1.0, max(0.0, share)) * PROGRESS)
    filled = ("#" if ascii_only else "█") * full
    return Text(filled + drawn[full:]).append(f" {share:.0%}")


def clock(seconds: float) -> str:
    """1:02:03, 4:05, 6 s."""
    whole = round(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{last:02d}"
    return f"{minutes}:{last:02d}" if minutes else f"{last} s"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
