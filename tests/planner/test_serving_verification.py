"""`plan_serving(verify=...)`: what is compiled, what it changes, and what is said of the rest."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import tpukit.checker.decoding as decoding
from tpukit.errors import XLACompilationError
from tpukit.models import get_preset
from tpukit.planner.serving import plan_serving

ASKED = {"batch": 8, "prompt_tokens": 32, "new_tokens": 32}


def answer(*, fits=True, token_s=2e-3, prefill_s=5e-3):
    one = SimpleNamespace(no_prediction="", memory=SimpleNamespace(total_bytes=123))
    return SimpleNamespace(
        fits=fits,
        token_s=token_s,
        prefill_s=prefill_s,
        prompt=32,
        context=64,
        decode=one,
        prefill=one,
    )


@pytest.fixture
def compiler(monkeypatch):
    asked = []

    def check_decoding(model, **how):
        asked.append(how)
        said = compiler.says
        if isinstance(said, Exception):
            raise said
        return said

    compiler = SimpleNamespace(asked=asked, says=answer())
    monkeypatch.setattr(decoding, "check_decoding", check_decoding)
    return compiler


def test_speeds_are_those_of_the_compiled_programs(compiler):
    plan = plan_serving("tiny", formats=["bf16"], generations=["v6e-4"], verify=1, **ASKED)
    (one,) = plan.choices
    (how,) = compiler.asked
    assert how["mesh"] == {"data": one.replicas, "tensor": one.tensor}
    assert (how["on"], how["batch_size"], how["context"], how["prompt"]) == ("v6e-4", 8, 64, 32)
    assert how["prefill_rows"] == one.replicas
    each = -(-8 // one.replicas)
    assert one.token_time.value == pytest.approx(2e-3 + each * 5e-3 / 32)
    assert one.tokens_per_s == pytest.approx(8 / one.token_time.value)
    assert one.first_token_time.value == 5e-3
    assert one.modelled.token_s != one.token_time.value
    assert "compiled programs" in one.served.source
    assert one.to_dict()["compiled"]["device_bytes"] == 123


def test_weights_and_cache_are_compiled_as_they_would_be_kept(compiler):
    formats = ["bf16", "int8", "fp8", "int4"]
    asked = {"cache": "fp8", "generations": ["7x-2x2x1"], "verify": 9, **ASKED}
    plan = plan_serving("tiny", formats=formats, **asked)
    assert all(one.is_compiled for one in plan.choices)
    assert sorted(how["weights"] for how in compiler.asked) == sorted(formats)
    assert {(how["activations"], how["kv"]) for how in compiler.asked} == {("bf16", "fp8")}
    plan_serving("tiny", formats=["fp8"], activations="fp8", **asked)
    assert compiler.asked[-1]["activations"] == "fp8"


def test_what_generation_does_not_hold_stays_arithmetic_and_says_so(compiler):
    asked = {"generations": ["v6e-4"], "verify": 9, **ASKED}
    plan = plan_serving("tiny", formats=["bf16", "vq"], **asked)
    assert len(compiler.asked) == 1
    coded = plan_serving("tiny", formats=["bf16"], cache="pq4", **asked).choices[0]
    for one in (plan.choices[1], coded):
        assert not one.is_compiled
        assert one.served.source.startswith("roofs")
        assert "no codebooks" in one.compiled.reason
    rounded = plan_serving("tiny", formats=["int8"], activations="int8", **asked).choices[0]
    assert "weights in int8 with bf16, not with int8" in rounded.compiled.reason
    assert len(compiler.asked) == 1
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(plan)
    shown = " ".join(console.export_text().split())
    assert "bf16 on v6e-4, compiled" in shown
    assert "vq on v6e-4, not compiled: there are no codebooks" in shown


def test_the_smallest_slices_are_compiled_first(compiler):
    plan = plan_serving(
        "tiny", formats=["bf16"], generations=["v6e-8", "v6e-1", "v6e-4"], verify=2, **ASKED
    )
    assert [how["on"] for how in compiler.asked] == ["v6e-1", "v6e-4"]
    assert plan.choices[0].compiled.reason == "only 2 were to be compiled"
    plan_serving("tiny", formats=["bf16"], generations=["v6e-1"], **ASKED)
    late = plan_serving(
        "tiny", formats=["bf16"], generations=["v6e-1"], verify=1, verify_seconds=-1, **ASKED
    )
    assert late.choices[0].compiled.reason == "-1 s were up"
    assert len(compiler.asked) == 2


def test_what_the_compiler_refuses_is_no_speed_of_its(compiler):
    asked = {"formats": ["bf16"], "generations": ["v6e-1"], "verify": 1, **ASKED}
    compiler.says = answer(fits=False, token_s=None, prefill_s=None)
    (one,) = plan_serving("tiny", **asked).choices
    assert (one.compiled.fits, one.is_compiled) == (False, False)
    assert "does not fit" in one.compiled.reason
    compiler.says = XLACompilationError("no such thing")
    (one,) = plan_serving("tiny", **asked).choices
    assert one.compiled.reason.startswith("no such thing")
    assert one.tokens_per_s == one.modelled.tokens_per_s


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_small_server_is_compiled_in_every_format():
    formats = ["bf16", "int8", "int4", "fp8"]
    asked = {"formats": formats, "cache": "fp8", "generations": ["v6e-4"], "verify": 4, **ASKED}
    # Rows are filled up to 128: narrower matrices would not be smaller for fewer bits.
    model = get_preset("tiny", d_model=512, d_ff=2048, n_heads=4, n_kv_heads=4, head_dim=128)
    choices = plan_serving(model, **asked).choices
    for one in choices:
        assert one.compiled.fits
        assert one.is_compiled
        assert one.compiled.context == 64
        assert one.token_time.value > 0
    held = [one.compiled.device_bytes for one in choices]
    assert held[0] > held[1] > held[2]
