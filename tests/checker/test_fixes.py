"""Fixes: what is proposed, in what order, and that a compile has the last word."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import tpukit
from tpukit.checker.fix import Fix, FixList, is_thin, rank, worth_showing
from tpukit.checker.job_fixes import JobShape, data_over_slices, propose_fixes
from tpukit.compiler.memory.view import MemoryReport
from tpukit.hardware import Slice
from tpukit.job.yaml_text import read_yaml
from tpukit.models import get_preset
from tpukit.step import OptimizerSpec

GIB = 2**30
SHAPE = JobShape(
    batch_size=32,
    batch_ways=8,
    microbatches=1,
    remat="none",
    optimizer=OptimizerSpec(),
    param_dtype="float32",
    mesh={"fsdp": 8},
    heads=32,
    layer_inputs_bytes=2 * GIB,
    parameter_shapes=tuple(get_preset("llama3.1-8b").parameter_shapes().values()),
    pipelined=False,
)


def report(*, fits=False, **purposes):
    sizes = {name.replace("_", " "): size * GIB for name, size in purposes.items()}
    return MemoryReport(
        program="step",
        slice=Slice.parse("v6e-8"),
        fits=fits,
        total_bytes=sum(sizes.values()),
        usable_bytes=31 * GIB,
        host_bytes=0,
        argument_bytes=0,
        temp_bytes=0,
        result_bytes=0,
        alias_bytes=0,
        purposes=sizes,
        buffers=(),
        peak=None,
        curve=(),
        schedule_length=0,
        findings=(),
    )


def too_many_activations():
    return report(parameters=4, optimizer_state=8, activations=40, temporaries=4, gradients=2)


def by_change(fixes):
    return {fix.text: fix for fix in fixes.fixes}


def test_estimates_are_the_arithmetic_they_claim():
    fixes = by_change(propose_fixes(SHAPE, too_many_activations()))
    assert fixes["remat: full"].estimate_bytes == (58 - 40 + 2) * GIB
    assert fixes["remat: offload=decoder_layer_input"].estimate_bytes == 18 * GIB
    # Activations and temporaries halve; one gradient for every weight stays: 58 - 22 + 2.
    assert fixes["microbatches: 2"].estimate_bytes == 38 * GIB
    assert fixes["batch_size: 16"].estimate_bytes == 36 * GIB
    assert fixes["train.moment_dtype: bfloat16"].estimate_bytes == 56 * GIB
    # Rows and columns of matrices, and norms: a thousandth of the state.
    adafactor = fixes["train.optimizer: adafactor, train.moment_dtype: float32"]
    assert 0 < adafactor.estimate_bytes - 50 * GIB < 0.001 * 8 * GIB
    assert fixes["remat: minimal"].estimate_bytes is None
    assert fixes["remat: minimal"].estimate_reason
    assert "train.param_dtype: bfloat16" in fixes


def test_a_larger_slice_is_one_the_batch_can_be_split_over():
    fixes = propose_fixes(SHAPE, too_many_activations()).fixes
    (larger,) = [fix for fix in fixes if "on" in fix.changes]
    assert larger.changes == {"on": "v6e-16", "mesh": {"fsdp": 16}}
    assert larger.estimate_bytes == 29 * GIB
    odd = propose_fixes(replace(SHAPE, batch_size=24), too_many_activations()).fixes
    assert not [fix for fix in odd if "on" in fix.changes]


def test_what_should_fit_comes_first_and_the_cheapest_of_it():
    fixes = propose_fixes(SHAPE, too_many_activations()).fixes
    fitting = [fix.promising for fix in fixes]
    assert fitting == sorted(fitting, reverse=True)
    assert fixes[0].changes == {"microbatches": 4}
    texts = [fix.text for fix in fixes]
    assert texts.index("remat: full") < texts.index("batch_size: 8")


def test_a_compile_has_the_last_word():
    fix = Fix(changes={"remat": "full"}, cost="", estimate_bytes=20 * GIB, usable_bytes=31 * GIB)
    assert fix.promising
    refused = fix.verified(report(fits=False, parameters=40))
    assert not refused.promising
    failed = replace(fix, failure="no such thing")
    assert not failed.promising
    accepted = Fix(changes={"batch_size": 8}, cost="").verified(report(fits=True, parameters=3))
    assert rank([refused, failed, accepted]).fixes[0] is accepted


def test_when_nothing_alone_is_enough_all_together_is_tried():
    huge = report(parameters=16, optimizer_state=32, activations=40, temporaries=8)
    fixes = propose_fixes(replace(SHAPE, remat="minimal"), huge).fixes
    together = [fix for fix in fixes if len(fix.changes) > 2]
    assert len(together) == 1
    assert {"microbatches", "remat", "train.optimizer", "train.param_dtype"} <= set(
        together[0].changes
    )


def test_settings_that_are_there_already_are_not_proposed():
    lean = replace(
        SHAPE,
        remat="offload=decoder_layer_input",
        optimizer=OptimizerSpec(name="adafactor"),
        param_dtype="bfloat16",
        mesh={"fsdp": 4, "tensor": 2},
        batch_size=8,
        pipelined=True,
    )
    assert propose_fixes(lean, too_many_activations()).fixes == ()


def test_on_several_slices_a_mesh_that_fits_is_named():
    """fsdp over an odd number of slices divides no dimension: every device holds everything."""
    slices = Slice.parse("199xv5e-256")
    whole = replace(
        report(parameters=30, optimizer_state=60, gradients=15, temporaries=1), slice=slices
    )
    shape = replace(SHAPE, mesh={"fsdp": slices.devices}, batch_size=slices.devices)
    found = by_change(propose_fixes(shape, whole))
    fix = found["mesh: {data: 199, fsdp: 256}"]
    assert fix.promising
    assert fix.estimate_bytes < 2 * GIB
    assert not data_over_slices(replace(shape, mesh={"data": 199, "fsdp": 256}), whole)


def test_nothing_hopeless_is_shown():
    fitting = Fix(changes={"remat": "full"}, cost="", estimate_bytes=1, usable_bytes=2)
    unknown = Fix(changes={"remat": "minimal"}, cost="", estimate_reason="nobody knows")
    refused = replace(fitting, fits=False)
    too_little = replace(fitting, estimate_bytes=3)
    failed = replace(unknown, failure="no such thing")
    everything = FixList((fitting, unknown, refused, too_little, failed))
    assert worth_showing(everything).fixes == (fitting, unknown)
    # Where nothing helps, the nearest says how far off it is.
    assert worth_showing(FixList((too_little, failed))).fixes == (too_little,)


@pytest.mark.parametrize(
    ("used", "fits", "thin"), [(20, True, False), (30, True, True), (35, False, True)]
)
def test_thin_headroom(used, fits, thin):
    assert is_thin(report(fits=fits, parameters=used)) is thin


def test_changes_are_yaml_and_the_table_shows_both_origins():
    fixes = propose_fixes(SHAPE, too_many_activations())
    for fix in fixes.fixes:
        assert read_yaml("{" + fix.text + "}", name="fix")[0] == dict(fix.changes)
    json.dumps(fixes.to_dict())
    broken = replace(fixes.fixes[0], failure="it broke")
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(rank([broken, fixes.fixes[1].verified(report(fits=True, parameters=3))]))
    text = console.export_text()
    assert "estimate (model)" in text
    assert "compiled (compiler)" in text
    assert "it broke" in text
    assert "✓" in text


def test_the_advice_when_memory_runs_out_has_one_home():
    source = Path(tpukit.__file__).parent
    advice = re.compile(r"(use|try|\() ?a smaller batch|smaller batch, (more|remat)", re.IGNORECASE)
    homes = [path.name for path in source.rglob("*.py") if advice.search(path.read_text())]
    assert homes == ["errors.py"]
