"""What a temporary is for, on a small program written by hand in the compiler's style."""

import pytest

from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.memory.assignment import find_tenancies, parse_assignment, parse_live_ranges
from tpukit.compiler.memory.attribution import (
    Attributor,
    Provenance,
    argument_categories,
    is_training_step,
)
from tpukit.compiler.program.lowered import ProgramFacts

FORWARD = 'metadata={op_name="jit(step)/jvp()/%s" stack_frame_id=1}'
BACKWARD = 'metadata={op_name="jit(step)/transpose(jvp())/%s" stack_frame_id=1}'
HLO = f"""HloModule jit_call, is_scheduled=true

ENTRY %main (w: f32[64,512], x: bf16[96,512]) -> f32[64,512] {{
  %w = f32[64,512]{{1,0:T(8,128)}} parameter(0)
  %x = bf16[96,512]{{1,0:T(8,128)(2,1)}} parameter(1)
  %cast = bf16[64,512]{{1,0:T(8,128)(2,1)}} convert(%w), {FORWARD % "convert_element_type"}
  %whole = bf16[512,512]{{1,0:T(8,128)(2,1)}} all-gather(%cast), {FORWARD % "dot_general"}
  %kept = bf16[96,512]{{1,0:T(8,128)(2,1)}} fusion(%x, %whole), kind=kLoop, {FORWARD % "tanh"}
  %brief = bf16[96,96]{{1,0:T(8,128)(2,1)}} fusion(%kept), kind=kLoop, {FORWARD % "exp"}
  %copied = bf16[96,96]{{1,0:T(8,128)(2,1)}} copy(%brief)
  %again = bf16[512,512]{{1,0:T(8,128)(2,1)}} all-gather(%cast), {BACKWARD % "dot_general"}
  %nameless = bf16[96,32]{{1,0:T(8,128)(2,1)}} custom-call(%x), custom_call_target="Own"
  %grad = f32[512,512]{{1,0:T(8,128)}} fusion(%kept, %again), kind=kLoop, {BACKWARD % "dot_general"}
  %share = f32[64,512]{{1,0:T(8,128)}} reduce-scatter(%grad), {BACKWARD % "dot_general"}
  ROOT %out = f32[64,512]{{1,0:T(8,128)}} subtract(%w, %share)
}}
"""
ORDER = "w x cast whole kept brief copied again nameless grad share out".split()  # noqa: SIM905
LIFE = {
    "cast": (2, 7),
    "whole": (3, 4),
    "kept": (4, 9),
    "brief": (5, 6),
    "copied": (6, 6),
    "again": (7, 9),
    "nameless": (8, 8),
    "grad": (9, 10),
    "share": (10, 11),
}
EXPECTED = {
    "cast": "weight copies",
    "whole": "weight copies",
    "kept": "activations",
    "brief": "temporaries",
    "copied": "temporaries",  # named after what it copies
    "again": "weight copies",  # gathered once more for the backward pass
    "nameless": "unattributed",
    "grad": "gradients",
    "share": "gradients",
}
FACTS = ProgramFacts(
    name="step",
    argument_names=("[0].params['w']", "[1]['x']"),
    argument_copies=(1, 1),
    donated=(),
    mesh_axes=(("fsdp", 8),),
    fingerprint="",
    source_fingerprint="",
)


@pytest.fixture
def attributor_and_buffers():
    module = parse_hlo(HLO)
    lines = [
        "allocation 0: size 131072, parameter 0, shape |f32[64,512]| at ShapeIndex {}:",
        " value: <0 w @0> (size=131072,offset=0): f32[64,512]{1,0:T(8,128)}",
        "allocation 1: size 9999999, preallocated-temp:",
    ]
    for number, name in enumerate(LIFE, start=1):
        shape = str(module.entry.by_name[name].shapes[0])
        at = f"(size=1024,offset={number * 4096})"
        lines.append(f" value: <{number} {name} @0> {at}: {shape}{{1,0:T(8,128)}}")
    allocations = parse_assignment("\n".join(lines))
    schedule = parse_live_ranges(
        "  InstructionSequence:\n"
        + "".join(f"    {place}:{name}\n" for place, name in enumerate(ORDER))
        + "  BufferLiveRange:\n"
        + "".join(f"    {name}{{}}:{start}-{end}\n" for name, (start, end) in LIFE.items())
    )
    provenance = Provenance(module, argument_categories(FACTS))
    attributor = Attributor(module, schedule, provenance)
    return attributor, find_tenancies(allocations[1], schedule)


def test_each_temporary_has_its_purpose(attributor_and_buffers):
    attributor, buffers = attributor_and_buffers
    found = {one.values[0].instruction: attributor.category(one, one.end) for one in buffers}
    assert found == EXPECTED


def test_a_training_step_is_known_by_its_state():
    assert not is_training_step(FACTS)
    names = ("[0].params['w']", "[0].opt_state[0].mu['w']", "[1]['x']")
    assert is_training_step(
        ProgramFacts("step", names, (1, 1, 1), (), (), fingerprint="", source_fingerprint="")
    )
