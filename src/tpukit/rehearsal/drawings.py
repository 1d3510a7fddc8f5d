"""SVG drawings of a rehearsal: the timeline of stages and runs, and the losses of two runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..pages.charts import coordinate
from ..pages.markup import Markup, tag
from ..pods.supervision.journal import Attempt
from .stage import Moment, Played
from .stages.launch import LaunchedRun

WIDTH = 1100
_LEFT, _RIGHT = 96, 12
_LANE, _GAP, _AXIS = 30, 14, 26
_LETTER = 7.0  # units per character, about
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_LOSS_HEIGHT, _LOSS_LEFT = 260, 52


@dataclass(frozen=True)
class Axis:
    """A linear axis from seconds to positions."""

    began: float
    seconds: float
    left: float = _LEFT
    right: float = WIDTH - _RIGHT

    def place(self, at: float) -> float:
        """Return the position of a time."""
        share = (at - self.began) / max(self.seconds, 1e-9)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)


def timeline(
    played: Sequence[Played], runs: Sequence[LaunchedRun], moments: Sequence[Moment], axis: Axis
) -> Markup:
    """Return a lane of stages, and one per run with its attempts, saves and preemptions."""
    height = (1 + len(runs)) * (_LANE + _GAP) + _AXIS
    drawn = [*_ticks(axis, height), *_stage_lane(played, axis)]
    for number, run in enumerate(runs, 1):
        top = number * (_LANE + _GAP)
        drawn.append(_lane_title(run.name, top))
        drawn += [_attempt(attempt, axis, top) for attempt in run.outcome.attempts]
        drawn += _marks([moment for moment in moments if moment.of == run.name], axis, top)
    return _chart(drawn, height, "Stages, attempts, saves and preemptions over time")


def _lane_title(words: str, top: float) -> Markup:
    return tag("text", words, x=0, y=top + _LANE / 2 + 4)


def _stage_lane(played: Sequence[Played], axis: Axis) -> list[Markup]:
    drawn = [_lane_title("stages", 0)]
    for number, stage in enumerate(played):
        start, end = axis.place(stage.began), axis.place(stage.began + stage.seconds)
        words = f"{stage.name}: {stage.seconds:.1f} s, {stage.verdict}"
        kind = "stage-failed" if stage.verdict == "failed" else f"stage-{number % 2}"
        drawn.append(_rect(start, 0, end - start, words, kind))
        if end - start > _LETTER * len(stage.name) + 6:
            drawn.append(
                tag(
                    "text",
                    stage.name,
                    x=coordinate((start + end) / 2),
                    y=_LANE / 2 + 4,
                    text_anchor="middle",
                    class_="inside",
                )
            )
    return drawn


def _attempt(attempt: Attempt, axis: Axis, top: float) -> Markup:
    """Return an attempt, with its start paler than its steps."""
    began = attempt.started_at or attempt.asked_at
    ended = attempt.ended_at or began
    first = attempt.first_step_at or ended
    words = f"attempt {attempt.number} in {attempt.zone}: {attempt.ending}"
    steps = f"steps {attempt.first_step} to {attempt.last_step}"
    return tag(
        "g",
        _rect(axis.place(began), top, axis.place(first) - axis.place(began), words, "starting"),
        _rect(axis.place(first), top, axis.place(ended) - axis.place(first), steps, "stepping"),
    )


def _marks(moments: Sequence[Moment], axis: Axis, top: float) -> list[Markup]:
    drawn: list[Markup] = []
    for moment in moments:
        x = axis.place(moment.at)
        if moment.kind == "saved":
            place = {"x1": coordinate(x), "x2": coordinate(x)}
            line = tag(
                "line", tag("title", moment.text), **place, y1=top + _LANE - 8, y2=top + _LANE
            )
            drawn.append(tag("g", line, class_="save"))
        elif moment.kind == "preempted":
            points = f"{x - 6:.1f},{top - 9} {x + 6:.1f},{top - 9} {x:.1f},{top + 2}"
            drawn.append(
                tag("polygon", tag("title", moment.text), points=points, class_="preempted")
            )
    return drawn


def _rect(x: float, y: float, width: float, words: str, kind: str) -> Markup:
    return tag(
        "rect",
        tag("title", words),
        x=coordinate(x),
        y=coordinate(y),
        width=coordinate(max(width, 1.0)),
        height=_LANE,
        rx=3,
        class_=kind,
    )


def _ticks(axis: Axis, height: float) -> list[Markup]:
    step = next((tick for tick in _TICKS if axis.seconds / tick <= 12), _TICKS[-1])
    drawn: list[Markup] = []
    for number in range(int(axis.seconds // step) + 1):
        x = coordinate(axis.place(axis.began + number * step))
        drawn.append(tag("line", x1=x, x2=x, y1=0, y2=height - _AXIS + 4, class_="grid"))
        words = f"{number * step} s"
        drawn.append(tag("text", words, x=x, y=height - 6, text_anchor="middle"))
    return drawn


def losses(
    undisturbed: Mapping[int, float | None],
    preempted: Mapping[int, float | None],
    taken_after: Sequence[int],
) -> Markup:
    """Return the losses of both runs: a line for one, dots for the other."""
    steps = sorted({*undisturbed, *preempted})
    values = [loss for run in (undisturbed, preempted) for loss in run.values() if loss is not None]
    low, high = min(values), max(values)
    room = (high - low) or 1.0

    def x(step: float) -> float:
        width = WIDTH - _RIGHT - _LOSS_LEFT
        return _LOSS_LEFT + (step - steps[0]) / max(steps[-1] - steps[0], 1) * width

    def y(loss: float) -> float:
        return 12 + (high - loss) / room * (_LOSS_HEIGHT - 48)

    drawn: list[Markup] = []
    for number in range(5):
        loss = low + room * number / 4
        at = coordinate(y(loss))
        drawn.append(tag("line", x1=_LOSS_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        drawn.append(
            tag("text", f"{loss:.2f}", x=_LOSS_LEFT - 8, y=coordinate(y(loss) + 4),
                text_anchor="end")
        )  # fmt: skip
    for step in taken_after:
        at = coordinate(x(step))
        drawn.append(
            tag("line", tag("title", f"preempted after step {step}"), x1=at, x2=at, y1=4,
                y2=_LOSS_HEIGHT - 30, class_="limit-line")
        )  # fmt: skip
        drawn.append(
            tag("text", f"preempted after step {step}", x=at, y=_LOSS_HEIGHT - 12,
                text_anchor="middle", class_="limit-text")
        )  # fmt: skip
    points = " ".join(
        f"{x(step):.1f},{y(loss):.1f}" for step, loss in undisturbed.items() if loss is not None
    )
    drawn.append(tag("polyline", points=points, class_="curve"))
    drawn += [
        tag("circle", cx=coordinate(x(step)), cy=coordinate(y(loss)), r=2.6, class_="resumed")
        for step, loss in preempted.items()
        if loss is not None
    ]
    return _chart(drawn, _LOSS_HEIGHT, "Loss of every step of both runs")


def _chart(drawn: Sequence[Markup], height: float, words: str) -> Markup:
    """Return a drawing that scrolls sideways on a narrow screen, also by keyboard."""
    size = f"0 0 {WIDTH} {height}"
    inside = tag("svg", drawn, viewBox=size, class_="chart", role="img", aria_label=words)
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=words)
