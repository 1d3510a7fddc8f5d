"""`plan_serving(verify=...)`: what is compiled, what it changes, and what is said of the rest."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import tpukit.checker.decoding as decoding
from tpukit.errors import XLACompilationError
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


def test_what_generation_does_not_hold_stays_arithmetic_and_says_so(compiler):
    formats = ["bf16", "int8", "fp8", "int4"]
    plan = plan_serving("tiny", formats=formats, generations=["v6e-4"], verify=9, **ASKED)
    assert len(compiler.asked) == 1
    for one in plan.choices[1:]:
        assert not one.is_compiled
        assert one.served.source.startswith("roofs")
        assert "compiled with weights in bfloat16" in one.compiled.reason
    narrow = plan_serving(
        "tiny", formats=["bf16"], cache="fp8", generations=["v6e-4"], verify=9, **ASKED
    )
    assert [how["kv"] for how in compiler.asked] == ["bf16", "fp8"]
    assert narrow.choices[0].is_compiled
    coded = plan_serving(
        "tiny", formats=["bf16"], cache="pq4", generations=["v6e-4"], verify=9, **ASKED
    )
    assert len(compiler.asked) == 2
    assert "no codebooks" in coded.choices[0].compiled.reason
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(plan)
    shown = " ".join(console.export_text().split())
    assert "bf16 on v6e-4, compiled" in shown
    assert "int8 on v6e-4, not compiled: generation is" in shown


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
def test_a_small_server_is_compiled():
    asked = {"formats": ["bf16"], "generations": ["v6e-4"], "verify": 1, **ASKED}
    (one,) = plan_serving("tiny", **asked).choices
    assert one.compiled.fits
    assert one.is_compiled
    assert one.compiled.context == 64
    assert one.token_time.value > 0
