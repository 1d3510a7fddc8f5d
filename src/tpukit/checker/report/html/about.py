"""What could be changed, what to run next, and what all of it rests on."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ....hardware.figure import ORIGINS, bytes_text, seconds_text
from ....pages.markup import Child, Markup, join, tag
from ....pages.parts import (
    Column,
    Section,
    absent,
    badge,
    code,
    command,
    definitions,
    section,
    table,
)
from ..schema import Report

# Kept on one line by spaces that do not break.
_COMPILED = {True: "✓\u00a0fits", False: "✗\u00a0too\u00a0large", None: "not\u00a0compiled"}


def next_section(report: Report) -> Section:
    """Fixes and the command to run next."""
    fixes, run_next = report.get("fixes"), report.get("next")
    return section("Next", command(run_next) if run_next else "", _fixes(fixes) if fixes else "")


def about_section(report: Report) -> Section:
    """Job, options, versions, and what the badges mean."""
    compiled = report.get("compile") or {}
    job = {
        key: value
        for key, value in (report.get("job") or {}).items()
        if value not in (None, {}, "") and key != "options"
    }
    options = report.get("options")
    made = dict(report.get("versions") or {})
    target = report.get("slice") or {}
    if target:
        shape = "x".join(str(size) for size in target["topology"])
        chips = f"{target['chips']:,} chips ({shape}), {target['hosts']:,} hosts"
        made[target["name"]] = chips
    return section(
        "About",
        _list("The job", job) if job else absent("A bare function, so there is no job to show."),
        _list("Compiler options", options) if options else absent("No compiler options were set."),
        _list("Versions and slice", made) if made else absent("No versions were recorded."),
        _compile(compiled),
        tag("h3", "Where numbers come from"),
        definitions((badge(origin), words) for origin, words in ORIGINS.items()),
    )


def _compile(compiled: Mapping[str, Any]) -> Child:
    took = (compiled.get("compile_s") or {}).get("value")
    if took is None:
        return ""
    earlier = " in an earlier run, kept on disk" if compiled.get("from_cache") else ""
    return tag("p", f"The compiler took {seconds_text(took)}{earlier}. ", badge("measured"))


def _list(title: str, values: Mapping[str, Any]) -> Markup:
    shown = definitions((key, code(_plain(value))) for key, value in values.items())
    return join(tag("h3", title), shown)


def _fixes(fixes: Sequence[Mapping[str, Any]]) -> Markup:
    rows: list[Sequence[Child]] = []
    for fix in fixes:
        verified, estimate = fix["verified"]["value"], fix["estimate"]["value"]
        amount = verified if verified is not None else estimate
        reason = fix.get("failure") or fix["estimate"].get("reason") or ""
        origin = "compiler" if verified is not None else "model"
        size = (
            join(bytes_text(amount), " ", badge(origin))
            if amount is not None
            else tag("div", reason, class_="reason")
        )
        fits = _COMPILED[fix["fits"]]
        changes = ", ".join(f"{key}: {_plain(value)}" for key, value in fix["changes"].items())
        rows.append((code(changes), size, fits, fix["cost"]))
    columns = (
        Column("change"),
        Column("HBM per device"),
        Column("compiled"),
        Column("what it costs"),
    )
    return table(columns, rows, caption="Changes that take less memory, the best first")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        inside = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{key}: {item}" for key, item in inside.items()) + "}"
    return str(value)
