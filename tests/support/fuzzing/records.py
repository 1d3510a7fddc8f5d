"""Records: run directories, reports of checks, traces."""

import gzip
import json
from pathlib import Path

from .kinds import JSON_ATTACKS, command, kind


def _dashboard():
    from tpukit.observe.runs.run import find_runs

    for run in find_runs("."):
        run.summary().to_dict()


@kind(
    "run records",
    command("top", "run", "--once"),
    command("top", "run", "--once", "--json"),
    command("top", "--once", "--replay", "run/hosts/0/readings.jsonl"),
    _dashboard,
)
def _run(folder):
    from recorded_run import write_run

    write_run(folder / "run", hosts=2, steps=12)


@kind(
    "report",
    command("report", "html", "report.json", "-o", "out.html"),
    command("report", "diff", "report.json", "other.json"),
    command("report", "diff", "other.json", "report.json", "--html", "out.html", "--json"),
    command("report", "perfetto", "report.json", "-o", "out.json"),
    known=[("report.json", attack) for attack in JSON_ATTACKS],
)
def _report(folder):
    from sample_report import sample_report

    text = json.dumps(sample_report())
    for name in ("report.json", "other.json"):
        (folder / name).write_text(text)


@kind(
    "trace",
    command("profile", "one.xplane.pb"),
    command("profile", "one.xplane.pb", "--json"),
    command("profile", "several.xplane.pb", "--html", "out.html"),
)
def _trace(folder):
    from odd_input import ONE_OP

    (folder / "one.xplane.pb").write_bytes(ONE_OP)
    (folder / "several.xplane.pb").write_bytes(ONE_OP + ONE_OP.replace(b"TPU:0", b"TPU:1"))


def _read_timings():
    from measured_kernels import read_timings

    for row in read_timings(Path("timings.json")).rows:
        _ = row.describe(), row.program_key, row.chip


@kind(
    "measured kernels",
    _read_timings,
    known=[("timings.json", attack) for attack in (*JSON_ATTACKS, gzip.compress(bytes(1 << 28)))],
)
def _timings(folder):
    row = {"id": "a", "device": "v6e", "op": "gemm", "impl": "pallas", "measured_us": 3.5,
           "shapes": {"x": [8, 128], "y": [128, 8]}, "dtypes": {"x": "bfloat16", "y": "bfloat16"},
           "dims": {"m": 8, "n": 8}, "config": {"block": 8}, "static_args": {"causal": True},
           "num_devices": 1, "timing_method": "xplane", "source_date": "2026-01"}  # fmt: skip
    (folder / "timings.json").write_text(json.dumps([row] * 3))
