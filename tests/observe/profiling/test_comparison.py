"""Predicted beside measured: matched op by op, and honest about different devices."""

import json

import pytest
from sample_report import sample_report
from typer.testing import CliRunner
from xplanes import Event, Plane, xspace

from tpukit.cli.app import app
from tpukit.compiler.timeline import TrackSpan
from tpukit.observe.profiling.analysis import OpShare
from tpukit.observe.profiling.comparison import OTHER_DEVICE, SAME_DEVICE, compare, origin_of
from tpukit.observe.profiling.steps import MeasuredStep, PredictedStep, predicted_step


def decode(data):
    """Any protocol-buffer message of numbers and bytes: its values by field number."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = 8 if key & 7 == 1 else varint()
            value, at = data[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def processes_of(data):
    """Names of rows by process of a `.pftrace` file."""
    processes, rows = {}, {}
    for packet in map(decode, decode(data)[1]):
        for descriptor in map(decode, packet.get(60, ())):
            (uuid,) = descriptor[1]
            if 3 in descriptor:
                name = decode(descriptor[3][0])[6][0].decode()
                processes[uuid], rows[name] = name, []
            else:
                rows[processes[descriptor[5][0]]].append(descriptor[2][0].decode())
    return rows


def span(name, seconds, op_name="", *, times=1, cause="matrix", track="core"):
    return TrackSpan(track, name, 0.0, seconds, cause, op_name, 0.0, 0.0, times)


def op(name, seconds, op_name=""):
    return OpShare(name, "compute", "intensity", seconds, 1, op_name=op_name)


def predicted(*spans):
    seconds = {"compute": 1.0, "memory": 0.0, "communication": 0.0, "input": 0.0, "overhead": 0.0}
    return PredictedStep("step", "v6e-4", ("TPU v6 lite",), 1.0, seconds, spans)


def measured(*ops, kind="TPU v6 lite"):
    return MeasuredStep("run", f"4 x {kind}", kind, 10, 1.5, ops, ())


def test_the_same_hardware_is_matched_by_name_and_compared_in_seconds():
    found = compare(
        predicted(
            span("fusion.1", 0.1, "jit(f)/a", times=4),
            span("while.2", 0.4, cause="loop"),
            span("copy.3", 0.2),
            span("transfer", 9.0, track="ici"),  # beside the core
        ),
        measured(op("fusion.1", 0.6, "jit(f)/a"), op("other.9", 0.3)),
    )
    assert found.header.startswith(SAME_DEVICE)
    assert found.ratio == pytest.approx(1.5)
    (row,) = found.ops
    assert (row.name, row.matched_by) == ("fusion.1", "name")
    assert (row.predicted_s, row.measured_s) == (pytest.approx(0.4), 0.6)
    assert row.predicted_share == pytest.approx(0.4 / 0.6)
    assert row.measured_share == pytest.approx(0.6 / 0.9)
    assert [one.name for one in found.only_predicted] == ["copy.3"]
    assert [one.name for one in found.only_measured] == ["other.9"]
    told = found.to_dict()
    assert told["only_predicted"]["seconds"] == pytest.approx(0.2)
    assert told["only_measured"]["seconds"] == pytest.approx(0.3)


def test_another_device_is_matched_by_origin_and_compared_by_shares():
    found = compare(
        predicted(
            span("fusion.1", 0.3, "jit(step)/layer/dot"), span("fusion.2", 0.1, "jit(step)/b")
        ),
        measured(
            op("ynn_fusion", 3.0, "jit(train)/layer/dot"),
            op("wrapped", 1.0, "jit(train)/layer/dot"),
            op("fusion.2", 4.0, "jit(train)/c"),  # the same name by chance
            kind="cpu",
        ),
    )
    assert found.header.startswith(OTHER_DEVICE)
    assert found.ratio is None
    (row,) = found.ops
    assert (row.name, row.matched_by) == ("layer/dot", "op_name")
    assert row.measured_s == 4.0
    assert row.measured_share == pytest.approx(0.5)
    assert [one.name for one in found.only_predicted] == ["fusion.2"]
    assert [one.name for one in found.only_measured] == ["fusion.2"]


def test_nothing_is_lost_on_either_side():
    mine = [span(f"op.{i}", 0.1 * (i + 1), f"jit(f)/{i % 3}" if i % 2 else "") for i in range(9)]
    theirs = [op(f"op.{i}", 0.2 * (i + 1), f"jit(g)/{i % 4}" if i % 3 else "") for i in range(9)]
    for kind in ("TPU v6 lite", "cpu"):
        found = compare(predicted(*mine), measured(*theirs, kind=kind))
        sides = (
            sum(row.predicted_s for row in found.ops)
            + found.to_dict()["only_predicted"]["seconds"],
            sum(row.measured_s for row in found.ops) + found.to_dict()["only_measured"]["seconds"],
        )
        assert sides == (pytest.approx(4.5), pytest.approx(9.0))


def test_the_outer_jit_is_no_part_of_an_origin():
    assert origin_of("jit(train_step)/jvp(layer)/dot_general") == "jvp(layer)/dot_general"
    exported = "jit(call)/call_exported/jit(step)/jit(step)/jvp(layer)/dot_general"
    assert origin_of(exported) == "jvp(layer)/dot_general"
    assert origin_of("dot_general") == "dot_general"


def test_what_compilers_fuse_differently_is_matched_by_its_scope():
    found = compare(
        predicted(span("fusion.1", 0.3, "jit(f)/jvp/while/body/dot_general")),
        measured(op("dot.5", 1.0, "jit(f)/jvp/while/body/transpose"), kind="cpu"),
    )
    (row,) = found.ops
    assert (row.name, row.matched_by) == ("jvp/while/body", "scope")


def test_causes_of_a_report_become_the_kinds_of_a_recording():
    report = sample_report()
    report["prediction"]["seconds_by_cause"] = {
        "matrix": 1.0, "kernel": 2.0, "vector": 4.0, "hbm": 8.0, "ici": 16.0, "dcn": 32.0,
        "host": 64.0, "overhead": 128.0,
    }  # fmt: skip
    assert predicted_step(report).seconds_by_kind == {
        "compute": 7.0, "memory": 8.0, "communication": 48.0, "input": 64.0, "overhead": 128.0,
    }  # fmt: skip


@pytest.fixture
def files(tmp_path, recorded):
    check = tmp_path / "check.json"
    check.write_text(json.dumps(sample_report()))
    return check, recorded("compute").output_dir


def test_report_diff_takes_a_profile(files):
    check, folder = files
    result = CliRunner().invoke(app, ["report", "diff", str(check), str(folder)])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "model against a measurement on another device: v6e-8 against 1 x cpu" in text
    assert "only shares can be compared" in text
    assert "only predicted: " in text
    assert "only measured: " in text
    data = json.loads(
        CliRunner().invoke(app, ["report", "diff", str(check), str(folder), "--json"]).output
    )
    assert data["is_same_hardware"] is False
    assert data["predicted"]["step_time_s"] == pytest.approx(0.1)
    assert data["measured"]["steps"] == 3


def test_a_prediction_for_the_chip_that_ran_it_is_compared_in_seconds(tmp_path):
    ops = [Event(f"%{name} = f32[8] op()", at, length)
           for name, at, length in (("embed", 0, 12_000), ("adam", 12_000, 8_000))]  # fmt: skip
    marks = {"label": "x", "device_kind": "TPU v6 lite"}
    host = Plane("/host:CPU", {"python": [Event("tpukit.profile", 0, 20_000, marks)]})
    path = tmp_path / "tpu.xplane.pb"
    path.write_bytes(xspace(Plane("/device:TPU:0", {"XLA Ops": ops}), host))
    check = tmp_path / "check.json"
    check.write_text(json.dumps(sample_report()))
    result = CliRunner().invoke(app, ["report", "diff", str(check), str(path), "--json"])
    data = json.loads(result.output)
    assert data["is_same_hardware"] is True
    assert data["ratio"] == pytest.approx(0.2)  # 20 ms where 100 were predicted
    rows = {row["name"]: (row["predicted_s"], row["measured_s"]) for row in data["ops"]}
    assert rows == {
        "embed": (pytest.approx(0.010), pytest.approx(0.012)),
        "adam": (pytest.approx(0.010), pytest.approx(0.008)),
    }
    assert [one["name"] for one in data["only_predicted"]["ops"]] == [
        *("fusion.2", "all-gather-done.3"),
    ]


def test_both_steps_lie_in_one_trace_under_the_same_names(files, tmp_path):
    check, folder = files
    page = tmp_path / "page.html"
    result = CliRunner().invoke(
        app, ["profile", str(folder), "--predicted", str(check), "--html", str(page)]
    )
    assert result.exit_code == 0, result.output
    processes = processes_of(page.with_suffix(".pftrace").read_bytes())
    measured_name, predicted_name = processes
    assert measured_name.startswith("measured: compute step on 1 x cpu")
    assert predicted_name.startswith("predicted: tiny on v6e-8")
    assert set(processes[measured_name]) <= set(processes[predicted_name])
    assert "Core (MXU and VPU)" in processes[measured_name]


def test_profile_prints_shares_and_json(recorded):
    folder = str(recorded("memory").output_dir)
    result = CliRunner().invoke(app, ["profile", folder])
    assert result.exit_code == 0, result.output
    assert "memory bound" in result.output
    data = json.loads(CliRunner().invoke(app, ["profile", folder, "--json"]).output)
    assert data["largest"] == "memory"
    assert sum(value for key, value in data.items() if key.endswith("_bound")) == pytest.approx(1)
