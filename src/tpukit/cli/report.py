"""`tpukit report`: compare checks and measurements, or write a check as a page or trace."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import TPUValidationError
from ..plain_data import damaged_as
from .job_options import Json
from .output import Written, show
from .values import output_file

app = typer.Typer(no_args_is_help=True)
_reads_reports = damaged_as(
    TPUValidationError, "a report is damaged ({}); make it again with `tpukit check … --json`."
)

ReportFile = Annotated[Path, typer.Argument(help="Output of `tpukit check … --json`.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write.", callback=output_file)
]


@app.command("diff")
@_reads_reports
def diff(
    before: ReportFile,
    after: Annotated[
        Path,
        typer.Argument(help="Another check, or a profile: its folder, file or run directory."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(help="For two checks: file for an HTML page.", callback=output_file),
    ] = None,
    json: Json = False,
) -> None:
    """Compare two checks, and show only changes; or compare a check with a recording, op by op."""
    from ..checker.report import diff_reports, read_report, write_comparison
    from ..errors import ConfigError

    if os.path.isdir(after) or after.name.endswith(".pb"):
        if html is not None:
            raise ConfigError("--html is for two checks, and AFTER is a recording; leave it away.")
        from ..observe.profiling.comparison import compare
        from ..observe.profiling.profile import read_newest
        from ..observe.profiling.steps import predicted_step

        show(compare(predicted_step(before), read_newest(after).step), json=json)
        return
    found = diff_reports(read_report(before), read_report(after))
    if html is not None:
        write_comparison(found, html)
    show(found, json=json)


@app.command("html")
@_reads_reports
def write_page(report: ReportFile, output: Output = None, json: Json = False) -> None:
    """Write a check as one self-contained HTML file."""
    from ..checker.report import read_report, write_html

    written = write_html(read_report(report), output or report.with_suffix(".html"))
    show(Written((written,)), json=json)


@app.command("perfetto")
@_reads_reports
def perfetto(report: ReportFile, output: Output = None, json: Json = False) -> None:
    """Write a check's timeline as .json or .pftrace, optionally .gz, for ui.perfetto.dev."""
    from ..checker.report import read_report, spans_of, step_title, write_perfetto

    kept = read_report(report)
    path = output or report.with_suffix(".pftrace")
    written = write_perfetto(
        spans_of(kept), path, memory=kept.get("live_memory"), name=step_title(kept)
    )
    show(Written((written,), "; open it at https://ui.perfetto.dev"), json=json)
