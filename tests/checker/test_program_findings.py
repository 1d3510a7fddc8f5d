"""Findings on trainers that have a defect, and none on the trainer that has not."""

import sys
from dataclasses import replace

import pytest
from trainers import CARELESS, GATHERS, OFFLOADS, ONE_STEP, SMALL_BLOCKS

import tpukit
from tpukit.checker.memory_findings import find_in_memory
from tpukit.checker.program_findings import find_in_trace

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
DEFECTS = {
    *("float32 matmul", "attention scores", "host callback", "recompile", "transfer"),
    *("replicated optimizer state", "donation not used", "whole all-gather", "small blocks"),
    *("remat not in effect", "idle devices", "open loop"),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Return the findings on a script by kind, each script checked once."""
    folder = tmp_path_factory.mktemp("trainers")
    known = {}

    def find(text):
        if text not in known:
            script = folder / "their_train.py"
            script.write_text(text)
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("XLA_FLAGS", raising=False)
                known[text] = tpukit.check_program([sys.executable, str(script)], "v6e-8")
        return known[text], {one.kind: one for one in known[text].findings}

    return find


def test_a_careful_trainer_has_no_defect(findings):
    result, found = findings(ONE_STEP)
    assert not DEFECTS & set(found)
    assert result.fixes is None
    assert found["recomputation"].seconds > 0


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        ("float32 matmul", "precision 'highest' takes six passes"),
        ("attention scores", "[8,2,2048,2048]"),
        ("host callback", "2 calls into Python per step (debug_print at "),
        ("recompile", "state['count'] is a Python number in the first call and a typed array"),
        ("transfer", "as numpy arrays at the call itself"),
        ("replicated optimizer state", "state['moments']['w']: 8 of 8 devices keep the same part"),
    ],
)
def test_a_careless_trainer(findings, kind, evidence):
    _, found = findings(CARELESS)
    assert evidence in found[kind].evidence
    assert found[kind].advice
    if kind not in ("host callback", "recompile"):
        assert found[kind].seconds > 0


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        ("whole all-gather", "params['w'] with all of its layers, 32 MiB"),
        ("donation not used", "moments['w'] f32[4,2048,2048]"),
        ("recompile", "moments['scale'] is f32[2048] in the first call and bf16[2048]"),
        ("remat not in effect", "computes 0 FLOP again"),
    ],
)
def test_a_trainer_that_gathers_everything(findings, kind, evidence):
    _, found = findings(GATHERS)
    assert evidence in found[kind].evidence
    if kind == "whole all-gather":
        assert found[kind].seconds > 0
    if kind == "donation not used":
        # Eight devices share it.
        assert found[kind].size_bytes == 4 * 4 * 2048 * 2048 // 8


@pytest.mark.slow
def test_attention_that_the_compiler_makes_a_kernel_of(findings):
    """libtpu puts a kernel of its own in place of attention that has no gradient."""
    forward = CARELESS.replace('* params["scale"][:HEAD].astype(x.dtype)', "")
    result, found = findings(forward)
    assert "attention scores" not in found
    assert "which the compiler made of plain operations" in found["kernel"].evidence
    # Scores and their product with values, beside forward and backward of the layers.
    attention = 2 * 2 * 8 * 2 * 2048 * 2048 * 128
    layers = 3 * 4 * 2 * 2048 * 2048 * 2048 - 2 * 2048**3  # the batch has no gradient
    assert result.to_dict()["capture"]["model_flops"]["value"] == attention + layers


@pytest.mark.slow
def test_state_in_host_memory(findings):
    result, found = findings(OFFLOADS)
    moments = 4 * 4 * 2048 * 2048
    assert result.host_memory.offloaded.value == moments  # one host has all eight devices
    assert result.host_memory.offloaded.origin == "compiler"
    assert found["offload"].seconds > 0
    assert "8 MiB" in found["offload"].evidence


def test_a_donated_batch_is_no_defect(findings):
    result, _ = findings(ONE_STEP)
    facts = result.program.program.facts
    numbers = range(len(facts.argument_names))
    large = tuple(2**30 if number == numbers[-1] else 0 for number in numbers)  # the batch
    every = replace(facts, donated=tuple(numbers), argument_bytes=large)
    donating = replace(result.program, program=replace(result.program.program, facts=every))
    assert not list(find_in_memory(donating, result.compiled, None))
    unnamed = replace(every, argument_purposes=("parameters",) * len(numbers))
    donating = replace(donating, program=replace(donating.program, facts=unnamed))
    assert [one.kind for one in find_in_memory(donating, result.compiled, None)] == [
        "donation not used"
    ]


def test_a_step_of_several_shapes_is_compiled_for_each(findings):
    result, _ = findings(ONE_STEP)
    twice = replace(result.captured, listed=(*result.captured.listed, *result.captured.listed))
    program, compiled = result.program, result.compiled
    assert not list(find_in_trace(result.captured, program, compiled, None))
    (found,) = find_in_trace(twice, program, compiled, None)
    assert "train_step was compiled 2 times for different arguments" in found.evidence


def test_lines_are_those_of_the_script(findings):
    _, found = findings(CARELESS)
    line = next(n for n, text in enumerate(CARELESS.splitlines(), 1) if "bhqd,bhkd" in text)
    assert f"their_train.py:{line} " in found["attention scores"].evidence


@pytest.mark.slow
def test_small_blocks_of_a_kernel(findings):
    result, found = findings(SMALL_BLOCKS)
    assert "their_matmul multiplies in 4,096 blocks" in found["small blocks"].evidence
    assert "grid 16x16x16, blocks 128x128" in found["kernel"].evidence
    # Kernels count as they run: one product, beside forward and backward of four layers.
    product = 2 * 8 * 2048 * 2048 * 2048
    assert result.to_dict()["capture"]["model_flops"]["value"] == 13 * product
    larger, found = findings(SMALL_BLOCKS.replace("BLOCK, ROWS = 128", "BLOCK, ROWS = 512"))
    assert "small blocks" not in found
    kernel = max(one.seconds for one in result.findings if one.kind == "kernel")
    assert found["kernel"].seconds < kernel / 2
    assert larger.fits
