"""The report of a real compile, held against the compiler's own total and the shapes given."""

import io
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from tpukit.compiler import compile_for
from tpukit.compiler.memory.attribution import CATEGORIES, argument_category
from tpukit.compiler.memory.reading import short_op_name
from tpukit.compiler.memory.view import readable_path

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
MIB = 2**20
WEIGHTS_BYTES = 2 * 1024 * 4096 * 4 // 8  # two matrices in float32, an eighth on each device


def shown(result, width=120):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(result)
    return console.export_text()


def test_every_byte_of_the_compilers_total_is_spoken_for(trained):
    report = trained.compiled.memory
    assert report.total_bytes == trained.reported_total
    assert sum(report.purposes.values()) == report.total_bytes
    assert set(report.purposes) <= set(CATEGORIES)
    assert report.fits
    assert report.headroom_bytes == report.usable_bytes - report.total_bytes


def test_arguments_have_the_size_of_their_shapes(trained):
    report = trained.compiled.memory
    assert report.purposes["parameters"] == WEIGHTS_BYTES
    assert report.purposes["optimizer state"] == WEIGHTS_BYTES
    assert report.purposes["batch inputs"] == 8192 * 1024 * 4 // 8
    assert report.purposes["arguments"] == 2048 * 1024 * 4
    assert report.argument_bytes == sum(
        report.purposes[name]
        for name in ("parameters", "optimizer state", "batch inputs", "arguments")
    )


def test_buffers_name_their_argument_or_their_line(trained):
    buffers = trained.compiled.memory.buffers
    assert [one.size_bytes for one in buffers] == sorted(
        (one.size_bytes for one in buffers), reverse=True
    )
    by_name = {one.name: one for one in buffers}
    assert by_name["[0]['params']['up']"].shape == "f32[1024,512]"
    assert by_name["[0]['params']['up']"].purpose == "parameters"
    lines = {one.source.rsplit(":", 1)[0] for one in buffers if one.source}
    assert lines == {"tests/compiler/conftest.py"}


def test_the_curve_peaks_where_the_report_says(trained):
    report = trained.compiled.memory
    assert report.peak is not None
    highest = max(amount for _, amount in report.curve)
    assert (report.peak.position, highest) in report.curve
    assert highest == report.total_bytes - report.purposes.get("gaps", 0)
    assert report.schedule_length > report.peak.position


def test_what_is_not_donated_or_replicated_is_called_out(trained):
    kinds = {(one.kind, one.what.split()[0]) for one in trained.compiled.memory.findings}
    assert ("not donated", "[0]['params']['up']") in kinds
    assert ("replicated", "[0]['table']") in kinds
    assert ("replicated", "[0]['params']['up']") not in kinds
    text = shown(trained.compiled.memory)
    assert "all 8 devices hold the whole of it" in text


def test_the_report_prints_and_is_json(trained):
    text = shown(trained.compiled)
    assert text.startswith("FITS training_step on v6e-8")
    assert "params.up" in text
    data = json.loads(json.dumps(trained.compiled.to_dict()))
    assert data["memory"]["origin"] == "compiler"
    assert data["memory"]["total_bytes"] == trained.reported_total
    assert data["stage"] == "schedule"
    # Two products forward, and backward all gradients but that of the batch.
    assert data["flops_per_device"]["value"] == 5 * 2 * (8192 / 8) * 1024 * 4096


def test_stages_and_devices(trained):
    assert trained.stages == ["trace", "lower", "compile", "memory", "schedule"]
    assert trained.compiled.stage == "schedule"
    assert sorted(trained.compiled.coordinates) == sorted(
        (x, y, 0) for x in range(2) for y in range(4)
    )
    assert trained.compiled.slice_of_device == (0,) * 8


def test_files_appear_in_the_order_that_tells_when_they_are_whole(trained):
    # The child is stopped once the report exists, so the others must be complete by then; the
    # last of these need not have been written yet.
    endings = (
        "after_optimizations.txt",
        "after_optimizations-buffer-assignment.txt",
        "after_optimizations-live-range.txt",
        "after_optimizations-memory-usage-report.txt",
        "after_optimizations_after_buffer_assignment.txt",
    )
    found = [[*trained.folder.glob(f"*.jit_call.*.{end}")] for end in endings]
    assert [len(one) for one in found[:-1]] == [1, 1, 1, 1]
    *others, report = (one[0].stat().st_mtime_ns for one in found[:-1])
    assert max(others) <= report
    assert all(one.stat().st_mtime_ns >= report for one in found[-1])


def test_what_does_not_fit_is_explained_all_the_same():
    def grow(x, y):
        return jnp.sin(x @ y).sum()

    sizes = jax.ShapeDtypeStruct((150_000, 150_000), jnp.bfloat16)
    compiled = compile_for(grow, "v6e-1", sizes, sizes, until="memory")
    report = compiled.memory
    assert not compiled.fits
    assert report.headroom_bytes < 0
    assert report.total_bytes > 2 * 150_000**2 * 2
    assert sum(report.purposes.values()) == report.total_bytes
    assert report.buffers[0].size_bytes >= 150_000**2 * 2
    assert report.verdict.endswith("too much")
    assert shown(compiled).startswith("DOES NOT FIT grow on v6e-1")
    assert "bf16[150000,150000]" in report.refusal


@pytest.mark.parametrize(
    ("name", "is_training", "purpose"),
    [
        ("[0].params['embed']", True, "parameters"),
        ("[0].opt_state[0].mu['embed']", True, "optimizer state"),
        ("[1]['inputs']", True, "batch inputs"),
        ("[1]['inputs']", False, "arguments"),
        ("[0].step", True, "arguments"),
        ("[0]['params']['w']", False, "parameters"),
    ],
)
def test_arguments_by_name(name, is_training, purpose):
    assert argument_category(name, is_training=is_training) == purpose


def test_names_a_person_can_read():
    assert readable_path("[0].params['layers']['w']") == "params.layers.w"
    assert readable_path("[1]") == "[1]"
    assert short_op_name("jit(call)/call_exported/jit(step)/jvp()/dot") == "jvp()/dot"
    assert short_op_name("jit(f)") == "jit(f)"
