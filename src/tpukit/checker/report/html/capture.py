"""The program that was captured: how it was run, what one step consists of, what it really does."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ....hardware.figure import bytes_text, flops_text, seconds_text
from ....pages.markup import Child, join, tag
from ....pages.parts import Column, PageSection, absent, badge, code, command, section, table


def capture_section(capture: Mapping[str, Any]) -> PageSection:
    """Return command, programs and findings of a captured program."""
    hosts = capture["processes"]
    peak = capture["peak_bytes"]["value"]
    how = (
        f"Run unmodified as process 0 of {hosts}, with jax {capture['versions']['jax']} on Python "
        f"{capture['versions']['python']}, in {seconds_text(capture['capture_s']['value'])}"
    )
    how += f" and {bytes_text(peak)} of host memory. " if peak else ". "
    notes = [f"Note: {note}" for note in capture["notes"]]
    if capture["written_count"]:
        notes.append(f"It opened {capture['written_count']} files for writing before its step.")
    if capture["refused"]:
        notes.append(f"It was kept from {', '.join(capture['refused'])}.")
    return section(
        "The program",
        command(shlex.join(capture["command"])),
        tag("p", how, "Nothing large was executed. ", badge("measured")),
        *(tag("p", note) for note in notes),
        _utilization(capture),
        _findings(capture["findings"]),
        _programs(capture["listed"], capture["programs"]),
    )


def _utilization(capture: Mapping[str, Any]) -> Child:
    """Return the share of the peak that a step reaches, with and without recomputation."""
    rows: list[Sequence[Child]] = []
    counts = (
        ("MFU", "mfu", "model_flops", capture.get("mfu_counted", "").rstrip(",")),
        ("hardware utilization", "hardware_utilization", "hardware_flops", "recomputation counts"),
    )
    for name, share, flops, how in counts:
        reached, counted = capture.get(share), capture.get(flops) or {}
        if reached is None:  # a report of an earlier version
            continue
        if reached["value"] is None:
            rows.append((name, "–", "–", reached["reason"]))
            continue
        value = join(f"{reached['value']:.1%} ", badge(reached["origin"]))
        rows.append((name, value, flops_text(counted["value"]), how))
    columns = (Column("share of peak"), Column(""), Column("per step"), Column("counted"))
    return table(columns, rows, caption="How much of the peak it reaches") if rows else ""


def _findings(findings: Sequence[Mapping[str, Any]]) -> Child:
    if not findings:
        return absent("No Pallas kernel, no callback, no float32 matmul of weight was found.")
    rows: list[Sequence[Child]] = []
    for one in findings:
        cost, size = one["seconds"], one.get("size_bytes")
        took = join(seconds_text(cost["value"]), " ", badge("model")) if cost else ""
        held = join(" ", bytes_text(size["value"]), " of HBM ", badge("compiler")) if size else ""
        shown = join(took, held) if cost or size else "–"
        rows.append((one["kind"], one["evidence"], shown, one["advice"] or "–"))
    columns = (Column("finding"), Column("evidence"), Column("cost per step"), Column("way out"))
    return table(columns, rows, caption="What it really does")


def _programs(listed: Sequence[Mapping[str, Any]], step: Sequence[Mapping[str, Any]]) -> Child:
    calls = {one["name"]: one["calls"] for one in step}
    rows: list[Sequence[Child]] = []
    for one in sorted(listed, key=lambda row: -row["flops"]):
        rows.append(
            (
                code(one["name"]),
                one["kind"]
                + (f", {calls[one['name']]} × per step" if one["name"] in calls else ""),
                f"{one['flops']:.3g}",
                bytes_text(one["bytes_in"]),
                f"{one['donated']} of {one['arguments']}",
                code(one["line"]),
            )
        )
    columns = (
        *(Column("program"), Column("kind"), Column("FLOPs"), Column("arguments")),
        *(Column("donated"), Column("first called at")),
    )
    return table(columns, rows, caption="Its large programs, recorded instead of run")
