"""A recording as one page: what bounds it, recommendations, and the data behind them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checker.report.perfetto import Trace, write_traces
from ...errors import TPUValidationError
from ...hardware.figure import ORIGINS, seconds_text
from ...pages.charts import BarMark, BarPiece, stacked_bar
from ...pages.frame import Page, asset
from ...pages.markup import Child, Markup, join, tag
from ...pages.parts import (
    Column,
    PageSection,
    absent,
    badge,
    bullets,
    card,
    code,
    colored,
    command,
    definitions,
    headline,
    long_table,
    section,
    table,
)
from ...plain_data import JsonObject
from ...runtime.files import write_output
from .analysis import BottleneckAnalysis, analyze_predicted
from .comparison import StepComparison, compare
from .judging import KINDS, MEANINGS
from .page_sections import (
    COLORS,
    comparison_section,
    findings_section,
    memory_section,
    ops_section,
    timeline_section,
    xprof_section,
)
from .profile import Profile
from .steps import PredictedStep
from .xprof import XprofFigures, xprof_figures


@dataclass(frozen=True)
class PageContent:
    """The content of a page.

    Attributes:
        profiles: Recordings; the last, which is the newest, is shown in full.
        predicted: A predicted step to show beside it, or alone without a recording.
    """

    profiles: Sequence[Profile]
    predicted: PredictedStep | None
    xprof: XprofFigures

    @property
    def newest(self) -> Profile | None:
        """The recording shown in full."""
        return self.profiles[-1] if self.profiles else None

    @property
    def analysis(self) -> BottleneckAnalysis:
        """The analysis of the newest recording; without one, of the prediction."""
        if self.newest is not None:
            return self.newest.analysis
        if self.predicted is None:
            raise TPUValidationError("there is nothing to show: neither a recording nor a check.")
        return analyze_predicted(self.predicted)

    @property
    def comparison(self) -> StepComparison | None:
        """The predicted step beside the measured one."""
        if self.newest is None or self.predicted is None:
            return None
        return compare(self.predicted, self.newest.step)

    def to_dict(self) -> JsonObject:
        """Return the content of the page as plain data."""
        memory = self.newest.memory if self.newest else None
        return {
            "analysis": self.analysis.to_dict(),
            "predicted": analyze_predicted(self.predicted).to_dict() if self.predicted else None,
            "comparison": self.comparison.to_dict() if self.comparison else None,
            "memory": memory.to_dict() if memory else None,
            "recordings": [
                {"label": profile.recording.label, "folder": str(profile.recording.folder)}
                for profile in self.profiles
            ],
            "xprof": self.xprof.to_dict(),
        }


def write_page(profiles: Sequence[Profile], predicted: PredictedStep | None, path: Path) -> Path:
    """Write the page, the same as JSON, and the steps as a trace for ui.perfetto.dev.

    Raises:
        TPUValidationError: There is nothing to show, or a file cannot be written.
    """
    newest = profiles[-1] if profiles else None
    xprof = xprof_figures(newest.recording if newest else None)
    content = PageContent(profiles, predicted, xprof)
    page = render_page(content)
    write_output(path, page)
    write_output(path.with_suffix(".json"), json.dumps(content.to_dict(), indent=2) + "\n")
    traces = step_traces(newest, predicted)
    if traces:
        write_traces(traces, path.with_suffix(".pftrace"))
    return path


def step_traces(profile: Profile | None, predicted: PredictedStep | None) -> list[Trace]:
    """Return a trace of the measured step and one of the predicted step, with the same rows."""
    traces: list[Trace] = []
    if profile is not None and profile.step.spans:
        name = f"measured: {profile.step.name} on {profile.step.where}, one device"
        traces.append(Trace.of(profile.step.spans, name=name, origin="measured"))
    if predicted is not None and predicted.spans:
        name = f"predicted: {predicted.name} on {predicted.where}, one device"
        traces.append(Trace.of(predicted.spans, name=name))
    return traces


def render_page(content: PageContent) -> str:
    """Return the page as HTML."""
    analysis = content.analysis
    newest = content.newest
    sections = [
        _shares_section(content),
        section("What to do", bullets(analysis.recommendations))
        if analysis.recommendations
        else section("What to do", absent("No share is large enough for a recommendation.")),
        ops_section(analysis),
    ]
    if newest is not None:
        sections.append(findings_section(analysis))
    sections.append(timeline_section(newest.step if newest else None, content.predicted))
    if content.comparison is not None:
        sections.append(comparison_section(content.comparison))
    if newest is not None:
        sections += [memory_section(newest), xprof_section(content.xprof)]
    return Page(
        title=f"{analysis.label}: {analysis.largest} bound",
        headline=_headline(content),
        sections=[*sections, _about_section(content)],
        footer="Made by tpukit's profiler.",
        style=asset(__package__, "profile.css"),
    ).render()


def _headline(content: PageContent) -> Markup:
    analysis, step = content.analysis, content.newest.step if content.newest else None
    share = analysis.shares[analysis.largest]
    length = seconds_text(analysis.duration_s)
    devices = f"{analysis.devices:,} device{'s' * (analysis.devices != 1)}"
    cards = [
        card("Bound by", analysis.largest, f"{share:.0%} of the time", analysis.origin),
        card("Profiled", length, f"{devices}, compiling left out", analysis.origin)
        if step
        else card("Predicted step", length, analysis.where, analysis.origin),
        card(
            "Devices busy",
            f"{analysis.busy:.0%}",
            "computing, moving memory or communicating",
            analysis.origin,
        ),
    ]
    if step is not None:
        cards.append(
            card("Step", seconds_text(step.step_time_s), f"mean of {step.steps}", "measured")
        )
    lead = join(f"{share:.0%} {analysis.largest} bound: {MEANINGS[analysis.largest]}. ",
                badge(analysis.origin))  # fmt: skip
    return headline(analysis.label, f"on {analysis.where}", lead=lead, cards=cards)


def _shares_section(content: PageContent) -> PageSection:
    analysis = content.analysis
    shown: list[Markup] = [_bar(analysis)]
    columns = [
        Column("bound by"),
        Column("share", is_number=True, origin=analysis.origin),
        Column("what it is"),
    ]
    predicted = None
    if content.newest is not None and content.predicted is not None:
        predicted = analyze_predicted(content.predicted)
        shown += [tag("h3", f"Predicted for {predicted.where} ", badge("model")), _bar(predicted)]
        columns.insert(2, Column("predicted", is_number=True, origin="model"))
    rows: list[Sequence[Child]] = []
    for kind in sorted(KINDS, key=lambda kind: -analysis.shares[kind]):
        share = [f"{analysis.shares[kind]:.1%}"]
        share += [f"{predicted.shares[kind]:.1%}"] if predicted else []
        rows.append((colored(COLORS[kind], kind), *share, MEANINGS[kind]))
    others = content.profiles[:-1]
    return section(
        "Shares",
        shown,
        table(columns, rows, caption="Shares of the time of all devices; they add up to one"),
        _others(others) if others else "",
        [tag("p", note, class_="absent") for note in analysis.notes],
        intro=f"{seconds_text(analysis.duration_s)} on {analysis.where}.",
    )


def _bar(analysis: BottleneckAnalysis) -> Markup:
    pieces = [
        BarPiece(COLORS[kind], analysis.shares[kind], f"{kind}: {analysis.shares[kind]:.1%}")
        for kind in KINDS
        if analysis.shares[kind] > 0
    ]
    marks = [BarMark(0.0, "0"), BarMark(1.0, seconds_text(analysis.duration_s))]
    label = f"{analysis.label} by what bounds it"
    return stacked_bar(pieces, whole=1.0, label=label, marks=marks)


def _others(profiles: Sequence[Profile]) -> Markup:
    rows: list[Sequence[Child]] = []
    for profile in reversed(profiles):
        try:
            analysis = profile.analysis
        except TPUValidationError as error:
            rows.append((profile.recording.label, "–", "–", str(error)))
            continue
        largest = f"{analysis.largest}, {analysis.shares[analysis.largest]:.0%}"
        where = profile.recording.folder.name
        rows.append((analysis.label, seconds_text(analysis.duration_s), largest, where))
    columns = (Column("recording"), Column("profiled", is_number=True), Column("bound by"),
               Column("folder"))  # fmt: skip
    return long_table(columns, rows, caption="Earlier recordings", rest="more")


def _about_section(content: PageContent) -> PageSection:
    analysis = content.analysis
    parts: list[Child] = []
    if content.newest is not None:
        folder = content.newest.recording.folder
        # TensorBoard searches for plugins/profile below its log directory.
        is_usual = folder.parent.parts[-2:] == ("plugins", "profile")
        parts += [
            tag("p", "The trace is in ", code(str(folder)), "; view it with"),
            command(f"tensorboard --logdir {folder.parents[2] if is_usual else folder}"),
        ]
    if analysis.judged_by_intensity is not None:
        parts.append(
            tag(
                "p",
                f"{analysis.judged_by_intensity:.0%} of the ops' time is classified as compute or "
                f"memory bound by FLOPs and bytes of the recorded program, compared with "
                f"{analysis.roof}.",
            )
        )
    parts += [
        tag("h3", "Where numbers come from"),
        definitions((badge(origin), words) for origin, words in ORIGINS.items()),
    ]
    return section("About", parts)
