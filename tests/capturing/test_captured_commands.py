"""Unmodified programs as commands: what they see, what is recorded, and how failure is reported."""

import sys

import pytest
from trainers import AGREES, ALONE, APART, DECIDES, KERNEL, ONE_STEP

from tpukit.capturing.captured import read_capture
from tpukit.capturing.running import run_captured
from tpukit.errors import CaptureError
from tpukit.hardware import Slice

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]


@pytest.fixture
def capture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")

    def run(text, on="v6e-8", *, flags=(), **how):
        script = tmp_path / "their_train.py"
        script.write_text(text)
        return run_captured([sys.executable, *flags, str(script)], on, **how)

    return run


def test_a_step_is_recorded_and_not_run(capture, tmp_path):
    told = []
    captured = capture(ONE_STEP, "v6e-16", keep=tmp_path / "kept", progress=told.append)
    (step,) = captured.programs
    assert step.name == "train_step"
    assert step.about.kind == "training step"
    assert step.about.line.startswith(str(tmp_path / "their_train.py"))
    assert not (tmp_path / "checkpoint-0").exists()
    # Four hosts of four chips give 128 rows each.
    assert captured.processes == 4
    assert step.argument_types[-1] == "f32[512,2048]"
    assert step.program.facts.donated == (0, 1, 2, 3)
    assert sorted(step.program.facts.device_order) == list(range(16))
    assert "lower train_step for TPU" in told
    assert read_capture(tmp_path / "kept").programs == captured.programs


def test_hosts_agree_on_a_value(capture):
    captured = capture(AGREES, "v6e-16")
    assert [one.name for one in captured.programs] == ["train_step"]
    assert captured.peak_bytes < 2**30


def test_gradients_and_optimizer_apart_make_one_step(capture):
    captured = capture(APART)
    assert {one.name: one.calls for one in captured.programs} == {
        "loss": 2,
        "<lambda>": 1,
        "apply": 1,
    }


def test_a_named_program_and_a_branch_on_a_value(capture):
    captured = capture(DECIDES)
    (read,) = [one for one in captured.reads if one["how"] == "decided"]
    assert read["line"].rsplit(":", 1)[0].endswith("their_train.py")
    (evaluation,) = capture(DECIDES, program="loss").programs
    assert evaluation.about.kind == "other"


@pytest.mark.parametrize(
    ("text", "how", "words"),
    [
        (
            "import jax\nraise ValueError('no data in /corpus')",
            {},
            "ValueError: no data in /corpus",
        ),
        ("print(1)", {}, "jax was not imported"),
        ("import jax\njax.jit(lambda x: x + 1)(1.0)", {}, "no jitted function of it was large"),
        ("import jax\njax.jit(lambda x: x + 1)(1.0)", {"program": "step"}, "called 'step'"),
        ("import jax, time\ntime.sleep(60)", {"timeout_s": 3}, "within 3 s"),
        ("import jax", {"flags": ("-I",)}, "ignore PYTHONPATH"),
    ],
    ids=["raises", "no jax", "small", "no such program", "too long", "without the path"],
)
def test_failure_is_one_sentence_with_the_way_out(capture, text, how, words):
    with pytest.raises(CaptureError, match=words):
        capture(text, **how)


def test_a_command_that_is_none():
    with pytest.raises(CaptureError, match="'pyhton' is not a command here"):
        run_captured(["pyhton", "train.py"], "v6e-8")


def test_nothing_outside_is_reached(capture, tmp_path):
    asks = (
        "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), timeout=1)\n"
        "except OSError as error:\n    open('said', 'w').write(str(error))\n"
        "here = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(here.getsockname(), timeout=1).close()\n"
    )
    captured = capture(asks + ONE_STEP)
    said = (tmp_path / "said").read_text()
    assert "unreachable" in said or "offline" in said
    assert str(tmp_path / "said") in captured.written


def test_the_devices_are_those_of_libtpu(capture, tmp_path):
    shows = (
        "import jax, json\njson.dump([[d.id, d.process_index, *d.coords] for d in jax.devices()], "
        "open('devices', 'w'))\nassert jax.default_backend() == 'tpu'\n"
        "assert jax.devices('tpu')[0].device_kind == 'TPU v5'\n"
    )
    capture(shows + ONE_STEP, "v5p-32")
    import json

    from tpukit.hardware.slice import chip_positions

    seen = json.loads((tmp_path / "devices").read_text())
    expected = {one.coordinates: one.process for one in chip_positions(Slice.parse("v5p-32"))}
    assert {tuple(at): process for _, process, *at in seen} == expected


def test_a_jax_without_the_hook_is_refused_in_one_sentence(capture, tmp_path):
    private = tmp_path / "jax" / "_src"
    private.mkdir(parents=True)
    (tmp_path / "jax" / "__init__.py").write_text("__version__ = '0.4.1'")
    for name in ("__init__", "pjit", "source_info_util"):
        (private / f"{name}.py").write_text("")
    with pytest.raises(CaptureError, match=r"jax 0\.4\.1 has no function .* jax 0\.6\.2 to 0\.12"):
        capture("import jax\njax.jit")


def test_only_an_earlier_capture_is_replaced(capture, tmp_path):
    kept = tmp_path / "kept"
    for script in (DECIDES, ONE_STEP):
        capture(script, keep=kept)
    assert [one.name for one in read_capture(kept).listed].count("loss") == 0
    assert not [one.name for one in tmp_path.iterdir() if "partial" in one.name]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CaptureError, match="something other than a capture"):
        capture(ONE_STEP, keep=tmp_path / "notes")


def test_a_capture_moves_to_another_slice_where_nothing_depends_on_it(capture):
    moved = capture(ALONE).moved_to(Slice.parse("v5e-4"))
    there = capture(ALONE, "v5e-4")
    assert moved.slice == there.slice
    # Source lines are the only difference between two traces.
    assert [one.program.facts.argument_bytes for one in moved.programs] == [
        one.program.facts.argument_bytes for one in there.programs
    ]
    assert "may do something else" in moved.notes[-1]
    with pytest.raises(CaptureError, match=r"mesh of data=8 over its devices.*--on v6e-4 --"):
        capture(ONE_STEP).moved_to(Slice.parse("v6e-4"))
    kernel = capture(KERNEL)
    assert kernel.moved_to(Slice.parse("v6e-4")).programs == kernel.programs
    with pytest.raises(CaptureError, match=r"kernels \(double\) were traced for v6e"):
        kernel.moved_to(Slice.parse("v5e-8"))
