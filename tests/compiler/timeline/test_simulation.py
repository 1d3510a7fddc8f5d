"""The simulation against programs small enough to time by hand from the catalog's figures."""

import itertools

import pytest

from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.timeline import Machine, Network, Simulation, predict_step
from tpukit.compiler.timeline.simulate import Engine, Frame, TrackSpan
from tpukit.hardware import Slice

SLICE = Slice.parse("v6e-8")
MACHINE = Machine.of(SLICE)
COORDINATES = tuple(itertools.product(range(2), range(4)))
HBM_RATE = 1638e9 * MACHINE.hbm_efficiency
OVERHEAD = MACHINE.op_overhead_s
SMALLEST = "HloModule f\n\nENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
LARGE = "bf16[8192,8192]{1,0:T(8,128)(2,1)}"
IN_VMEM = "bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)}"


def run(body, *, computations="", kernel_timer=None):
    text = (
        "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
        + computations
        + "\nENTRY %main (a: bf16[8192,8192]) -> bf16[8192,8192] {\n"
        + "".join(f"  {line}\n" for line in body)
        + "}\n"
    )
    network = Network(MACHINE, COORDINATES, (0,) * 8)
    simulation = Simulation(parse_hlo(text), network, kernel_timer=kernel_timer)
    return simulation.run(), simulation.ledger


def test_a_product_runs_at_the_measured_share_of_peak():
    seconds, ledger = run(
        [
            f"%a = {IN_VMEM} parameter(0)",
            f"ROOT %dot = {IN_VMEM} dot(%a, %a), lhs_contracting_dims={{1}}, "
            "rhs_contracting_dims={0}",
        ]
    )
    flops = 2 * 4096**3
    assert [span.flops for span in ledger.spans] == [flops]
    expected = flops / (918e12 * MACHINE.matrix_efficiency) + OVERHEAD
    assert seconds == pytest.approx(expected)
    assert ledger.seconds["matrix"] == pytest.approx(expected - OVERHEAD)


def test_a_product_of_two_large_operands_is_slower():
    _, ledger = run(
        [
            f"%a = {LARGE} parameter(0)",
            f"ROOT %dot = {LARGE} dot(%a, %a), lhs_contracting_dims={{1}}, "
            "rhs_contracting_dims={0}",
        ]
    )
    expected = 2 * 8192**3 / (918e12 * MACHINE.streamed_matrix_efficiency)
    assert ledger.seconds["matrix"] == pytest.approx(expected)


def test_an_elementwise_op_runs_at_the_rate_of_hbm():
    seconds, ledger = run([f"%a = {LARGE} parameter(0)", f"ROOT %n = {LARGE} negate(%a)"])
    moved = 2 * 2 * 8192 * 8192  # read and written, two bytes each
    assert seconds == pytest.approx(moved / HBM_RATE + OVERHEAD)
    assert ledger.seconds["hbm"] == pytest.approx(moved / HBM_RATE)


def test_an_update_in_place_moves_only_the_update():
    body = [
        "%a = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)",
        "%u = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(1)",
        "%i = s32[]{:T(128)} constant(3)",
        "ROOT %d = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} "
        "dynamic-update-slice(%a, %u, %i, %i, %i)",
    ]
    seconds, _ = run(body)
    assert seconds == pytest.approx(2 * 2 * 1024 * 1024 / HBM_RATE + OVERHEAD)


GATHER = (
    "%g = (bf16[1024,8192]{1,0:T(8,128)(2,1)}, bf16[8192,8192]{1,0:T(8,128)(2,1)}) "
    "all-gather-start(%s), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"
)
# 2x4 without wrap: one link along each axis, and all devices take part.
GATHER_S = 2 * 8192 * 8192 * 7 / 8 / (2 * 90e9) + (1 + 3) * 1e-6


def test_a_collective_nobody_computes_beside_is_exposed():
    seconds, ledger = run(
        [
            "%s = bf16[1024,8192]{1,0:T(8,128)(2,1)} parameter(0)",
            GATHER,
            f"ROOT %d = {LARGE} all-gather-done(%g)",
        ]
    )
    assert seconds == pytest.approx(GATHER_S)
    assert ledger.seconds["ici"] == pytest.approx(GATHER_S)


def test_a_collective_hides_behind_compute():
    negations = [f"%n{i} = {LARGE} negate(%a)" for i in range(8)]
    seconds, ledger = run(
        [
            "%s = bf16[1024,8192]{1,0:T(8,128)(2,1)} parameter(0)",
            f"%a = {LARGE} parameter(1)",
            GATHER,
            *negations,
            f"ROOT %d = {LARGE} all-gather-done(%g)",
        ]
    )
    compute = 8 * (2 * 2 * 8192 * 8192 / HBM_RATE + OVERHEAD)
    assert compute > GATHER_S
    assert seconds == pytest.approx(compute)
    assert ledger.seconds["ici"] == 0.0
    assert ledger.hidden_s["ici"] == pytest.approx(GATHER_S)


def test_a_copy_to_vmem_drains_only_while_hbm_is_free():
    copy = [
        f"%c = ({IN_VMEM}, bf16[4096,4096]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) copy-start(%p)",
        f"ROOT %d = {IN_VMEM} copy-done(%c)",
    ]
    source = "%p = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)"
    copy_s = 2 * 4096 * 4096 / HBM_RATE
    alone, _ = run([source, *copy])
    assert alone == pytest.approx(copy_s)
    # An op that keeps HBM busy all the time leaves the copy nothing ...
    busy = f"%n = {LARGE} negate(%a)"
    seconds, _ = run([source, f"%a = {LARGE} parameter(1)", copy[0], busy, copy[1]])
    negate_s = 2 * 2 * 8192 * 8192 / HBM_RATE
    assert seconds == pytest.approx(negate_s + copy_s, rel=1e-3)
    # ... and one that works in VMEM hides it.
    product = f"%m = {IN_VMEM} dot(%v, %v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    hidden, _ = run([source, f"%v = {IN_VMEM} parameter(1)", copy[0], product, copy[1]])
    assert hidden == pytest.approx(2 * 4096**3 / (918e12 * MACHINE.matrix_efficiency) + OVERHEAD)


def test_the_host_link_carries_both_ways_at_once():
    to_host = (
        "%o = (bf16[8192,8192]{1,0:T(8,128)(2,1)S(5)}, bf16[8192,8192]{1,0:T(8,128)(2,1)}, "
        "u32[]{:S(2)}) copy-start(%a)"
    )
    from_host = (
        "%i = (bf16[8192,8192]{1,0:T(8,128)(2,1)}, bf16[8192,8192]{1,0:T(8,128)(2,1)S(5)}, "
        "u32[]{:S(2)}) copy-start(%h)"
    )
    seconds, ledger = run(
        [
            f"%a = {LARGE} parameter(0)",
            "%h = bf16[8192,8192]{1,0:T(8,128)(2,1)S(5)} parameter(1)",
            to_host,
            from_host,
            "%od = bf16[8192,8192]{1,0:T(8,128)(2,1)S(5)} copy-done(%o)",
            f"ROOT %id = {LARGE} copy-done(%i)",
        ]
    )
    one_way = 2 * 8192 * 8192 / MACHINE.host_bytes_per_s
    assert seconds == pytest.approx(one_way)
    assert ledger.seconds["host"] == pytest.approx(one_way)
    lengths = {span.name: span.duration_s for span in ledger.spans if span.track == "host"}
    assert lengths == {"o": pytest.approx(one_way), "i": pytest.approx(one_way)}
    assert ledger.hidden_s["host"] == pytest.approx(2 * one_way)  # the whole length of both


LOOP = f"""%body (p: (s32[], {LARGE})) -> (s32[], {LARGE}) {{
  %p = (s32[]{{:T(128)}}, {LARGE}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %x = {LARGE} get-tuple-element(%p), index=1
  %one = s32[]{{:T(128)}} constant(1)
  %next = s32[]{{:T(128)}} add(%i, %one)
  %n = {LARGE} negate(%x)
  ROOT %t = (s32[]{{:T(128)}}, {LARGE}) tuple(%next, %n)
}}

%condition (q: (s32[], {LARGE})) -> pred[] {{
  %q = (s32[]{{:T(128)}}, {LARGE}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %limit = s32[]{{:T(128)}} constant(5)
  ROOT %less = pred[]{{:T(512)}} compare(%j, %limit), direction=LT
}}
"""
LOOP_BODY = [
    f"%a = {LARGE} parameter(0)",
    "%zero = s32[]{:T(128)} constant(0)",
    f"%state = (s32[]{{:T(128)}}, {LARGE}) tuple(%zero, %a)",
    f"%loop = (s32[]{{:T(128)}}, {LARGE}) while(%state), condition=%condition, body=%body",
    f"ROOT %y = {LARGE} get-tuple-element(%loop), index=1",
]


def test_a_loop_takes_its_body_as_often_as_it_runs():
    seconds, ledger = run(LOOP_BODY, computations=LOOP)
    once = 2 * 2 * 8192 * 8192 / HBM_RATE
    assert ledger.seconds["hbm"] == pytest.approx(5 * once, rel=1e-3)
    assert seconds == pytest.approx(sum(ledger.seconds.values()))
    inside = next(span for span in ledger.spans if span.name == "n")
    assert inside.times == 5


@pytest.mark.parametrize(
    "branches",
    [
        "true_computation=%twice, false_computation=%nothing",
        "true_computation=%nothing, false_computation=%twice",
        "branch_computations={%nothing, %twice, %once}",
    ],
)
def test_of_a_conditional_the_longest_branch_counts(branches):
    parameter = f"(p: bf16[8192,8192]) -> bf16[8192,8192] {{\n  %p = {LARGE} parameter(0)\n"
    computations = (
        f"%nothing {parameter}  ROOT %c = {LARGE} bitcast(%p)\n}}\n\n"
        f"%once {parameter}  ROOT %n = {LARGE} negate(%p)\n}}\n\n"
        f"%twice {parameter}  %m = {LARGE} negate(%p)\n  ROOT %o = {LARGE} negate(%m)\n}}\n"
    )
    body = [
        f"%a = {LARGE} parameter(0)",
        "%which = pred[]{:T(512)} parameter(1)",
        f"ROOT %y = {LARGE} conditional(%which, %a, %a), {branches}",
    ]
    seconds, ledger = run(body, computations=computations)
    once = 2 * 2 * 8192 * 8192 / HBM_RATE
    assert ledger.seconds["hbm"] == pytest.approx(2 * once, rel=1e-3)
    assert seconds == pytest.approx(sum(ledger.seconds.values()))
    assert [span.name for span in ledger.spans if span.track == "core"] == ["m", "o"]


def test_what_cannot_be_timed_is_said():
    kernel = (
        f'%k = {LARGE} custom-call(%a), custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(f)/my_kernel"}'
    )
    text = (
        "HloModule jit_step, num_partitions=8\n\n"
        f"ENTRY %main (a: bf16[8192,8192]) -> bf16[8192,8192] {{\n  %a = {LARGE} parameter(0)\n"
        f"  ROOT {kernel}\n}}\n"
    )
    prediction = predict_step(
        parse_hlo(text), SLICE, coordinates=COORDINATES, slice_of_device=(0,) * 8
    )
    assert "1 Pallas kernels could not be timed" in prediction.caveats[0]


def test_the_parts_of_a_prediction_add_up_to_the_step():
    text = "HloModule jit_step, num_partitions=8\n\n" + LOOP
    text += "\nENTRY %main (a: bf16[8192,8192]) -> bf16[8192,8192] {\n"
    text += "".join(f"  {line}\n" for line in LOOP_BODY) + "}\n"
    prediction = predict_step(
        parse_hlo(text),
        SLICE,
        coordinates=COORDINATES,
        slice_of_device=(0,) * 8,
        tokens_per_step=8_000,
        model_flops=1e12,
    )
    assert sum(prediction.seconds_by_cause.values()) == pytest.approx(prediction.step_time_s)
    assert prediction.low_s < prediction.step_time_s < prediction.high_s
    assert prediction.tokens_per_s_per_chip == pytest.approx(1_000 / prediction.step_time_s)
    assert prediction.mfu == pytest.approx(1e12 / prediction.step_time_s / (8 * 918e12))
    data = prediction.to_dict()
    assert data["origin"] == "model"
    assert "causal" in data["mfu_convention"]
    assert prediction.top_ops(1)[0].name == "n"


def exchange(kind, *, sent, received, computing=0, slices=4):
    """A collective between slices with `computing` ops between its send and its receive."""
    notes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="x_0",'
        f'_xla_megascale_target="{{{",".join(map(str, range(1, slices + 1)))}}}x{{0:7}}",'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    return [
        f"%s = {sent} parameter(0)",
        f"%a = {LARGE} parameter(1)",
        "%t = token[] after-all()",
        f"%send = ({sent}, u32[]{{:S(2)}}, token[]) send(%s, %t), {notes}",
        "%sd = token[] send-done(%send)",
        *(f"%n{i} = {LARGE} negate(%a)" for i in range(computing)),
        f"%recv = ({received}, u32[]{{:S(2)}}, token[]) recv(%t), {notes}",
        f"%rd = ({received}, token[]) recv-done(%recv)",
        f"ROOT %r = {received} get-tuple-element(%rd), index=0",
    ]


SHARD, WHOLE = "bf16[1024,8192]{1,0:T(8,128)(2,1)}", "bf16[4,1024,8192]{2,1,0:T(8,128)(2,1)}"
SHARD_BYTES = 2 * 1024 * 8192


@pytest.mark.parametrize(
    ("kind", "received", "times"),
    [
        ("ALL_REDUCE", SHARD, 2 * 3 / 4),
        ("ALL_GATHER", WHOLE, 3),
        ("REDUCE_SCATTER", SHARD, 3 / 4),
        ("ALL_TO_ALL", SHARD, 3 / 4),
        ("", SHARD, 1),
    ],
)
def test_an_exchange_between_slices_takes_the_bytes_no_algorithm_can_save(kind, received, times):
    seconds, ledger = run(exchange(kind, sent=SHARD, received=received))
    wire_s = times * SHARD_BYTES / MACHINE.dcn_bytes_per_s
    assert seconds == pytest.approx(wire_s)
    assert ledger.hidden_s["dcn"] == pytest.approx(wire_s)
    assert ledger.seconds["host"] == pytest.approx(SHARD_BYTES / MACHINE.host_bytes_per_s)


def test_an_exchange_runs_from_its_send_however_late_the_receive_is_posted():
    seconds, ledger = run(exchange("ALL_REDUCE", sent=SHARD, received=SHARD, computing=40))
    assert ledger.seconds["dcn"] == 0.0
    assert seconds > 2 * 3 / 4 * SHARD_BYTES / MACHINE.dcn_bytes_per_s


def test_every_doubling_of_slices_waits_as_much_again():
    steps = []
    for slices in (1, 2, 8):
        target = Slice.parse(f"{slices}xv6e-8" if slices > 1 else "v6e-8")
        text = "HloModule jit_step, num_partitions=8\n\n"
        text += f"ENTRY %main (a: bf16[8192,8192]) -> bf16[8192,8192] {{\n  %a = {LARGE} "
        text += f"parameter(0)\n  ROOT %n = {LARGE} negate(%a)\n}}\n"
        prediction = predict_step(
            parse_hlo(text),
            target,
            coordinates=COORDINATES * slices,
            slice_of_device=tuple(range(slices)) * 8,
        )
        assert sum(prediction.seconds_by_cause.values()) == pytest.approx(prediction.step_time_s)
        steps.append(prediction.step_time_s)
    alone, two, eight = steps
    assert two / alone == pytest.approx(1 + MACHINE.wait_per_doubling)
    assert eight / alone == pytest.approx(1 + 3 * MACHINE.wait_per_doubling)


NESTED = """%copy_fusion (q: bf16[64,1024,1024]) -> bf16[64,1024,1024] {
  %q = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} copy(%q)
}

%fused (a: bf16[64,1024,1024], i: s32[]) -> bf16[1,1024,1024] {
  %fa = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %view = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} fusion(%fa), kind=kLoop, calls=%copy_fusion
  %fi = s32[]{:T(128)} parameter(1)
  ROOT %s = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} dynamic-slice(%view, %fi, %fi, %fi)
}
"""


def test_a_slice_of_a_stack_moves_one_layer_however_it_is_wrapped():
    body = [
        "%a = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)",
        "%i = s32[]{:T(128)} constant(3)",
        "ROOT %f = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} fusion(%a, %i), kind=kLoop, calls=%fused",
    ]
    seconds, _ = run(body, computations=NESTED)
    assert seconds == pytest.approx(2 * 2 * 1024 * 1024 / HBM_RATE + OVERHEAD, rel=1e-3)


def test_what_is_computed_from_a_stack_before_it_is_sliced_is_read_whole():
    computed = NESTED.replace("fusion(%fa), kind=kLoop, calls=%copy_fusion", "negate(%fa)")
    body = [
        "%a = bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)} parameter(0)",
        "%i = s32[]{:T(128)} constant(3)",
        "ROOT %f = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} fusion(%a, %i), kind=kLoop, calls=%fused",
    ]
    seconds, _ = run(body, computations=computed)
    moved = (64 + 1) * 2 * 1024 * 1024
    assert seconds == pytest.approx(moved / HBM_RATE + OVERHEAD, rel=1e-3)


def test_spans_follow_one_another_also_inside_a_loop():
    head, *rest = LOOP_BODY
    negation = f"%before = {LARGE} negate(%a)"
    rest = [line.replace("tuple(%zero, %a)", "tuple(%zero, %before)") for line in rest]
    _, ledger = run([head, negation, *rest], computations=LOOP)
    spans = {span.name: span for span in ledger.spans}
    once = 2 * 2 * 8192 * 8192 / HBM_RATE + OVERHEAD
    counting = spans["next"].duration_s  # the loop's own number, added up before the negation
    assert spans["before"].start_s == 0.0
    assert spans["before"].duration_s == pytest.approx(once)
    assert spans["loop"].start_s == pytest.approx(once)
    assert spans["next"].start_s == pytest.approx(once)
    assert spans["n"].start_s == pytest.approx(once + counting)
    assert spans["loop"].duration_s == pytest.approx(5 * (once + counting))


FUSED_SUM = f"""%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[]{{:T(256)}} parameter(0)
  %y = bf16[]{{:T(256)}} parameter(1)
  ROOT %z = bf16[]{{:T(256)}} add(%x, %y)
}}

%fused_sum (fa: bf16[8192,8192]) -> bf16[8192,8192] {{
  %fa = {LARGE} parameter(0)
  %d = {LARGE} dot(%fa, %fa), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %r = {LARGE} all-reduce(%d), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
}}

"""


def test_a_sum_fused_with_its_product_counts_both_as_often_as_they_run():
    fused = f"{LARGE} fusion(%x), kind=kOutput, calls=%fused_sum"
    loop = LOOP.replace(f"{LARGE} negate(%x)", fused)
    seconds, ledger = run(LOOP_BODY, computations=FUSED_SUM + loop)
    flops = 2 * 8192**3
    product_s = flops / (918e12 * MACHINE.streamed_matrix_efficiency)
    # Reduced over one axis of 2x4 after the other, then gathered over both at once.
    size = 2 * 8192 * 8192
    reduced = size * (1 / 2 + 1 / 2 * 3 / 4) / 90e9
    sum_s = reduced + size * 7 / 8 / (2 * 90e9) + 2 * (1 + 3) * 1e-6
    assert ledger.seconds["matrix"] == pytest.approx(5 * product_s)
    waited = max(sum_s, product_s) - product_s + OVERHEAD
    assert ledger.seconds["ici"] == pytest.approx(5 * waited)
    assert seconds == pytest.approx(sum(ledger.seconds.values()))


def test_a_slice_of_what_lies_in_vmem_costs_hbm_only_what_is_written():
    body = [
        f"%a = {IN_VMEM} parameter(0)",
        "%i = s32[]{:T(128)} constant(0)",
        "ROOT %s = bf16[2048,4096]{1,0:T(8,128)(2,1)} dynamic-slice(%a, %i, %i)",
    ]
    _, ledger = run(body)
    assert ledger.seconds["hbm"] == pytest.approx(2 * 2048 * 4096 / HBM_RATE)


def test_collectives_on_the_same_links_wait_for_one_another():
    second = GATHER.replace("%g =", "%h =").replace("channel_id=1", "channel_id=2")
    seconds, ledger = run(
        [
            "%s = bf16[1024,8192]{1,0:T(8,128)(2,1)} parameter(0)",
            GATHER,
            second,
            f"%d = {LARGE} all-gather-done(%g)",
            f"ROOT %e = {LARGE} all-gather-done(%h)",
        ]
    )
    assert seconds == pytest.approx(2 * GATHER_S)
    later = next(span for span in ledger.spans if span.name == "h")
    assert later.start_s == pytest.approx(GATHER_S)


def looped(*lines):
    """The loop above with other lines in its body, the last of which is %n."""
    return LOOP.replace(f"  %n = {LARGE} negate(%x)\n", "".join(f"  {line}\n" for line in lines))


NEGATE_S = 2 * 2 * 8192 * 8192 / HBM_RATE + OVERHEAD
TO_VMEM = f"%c = ({IN_VMEM}, bf16[4096,4096]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) copy-start(%x)"
TO_HOST = (
    "%o = (bf16[8192,8192]{1,0:T(8,128)(2,1)S(5)}, bf16[8192,8192]{1,0:T(8,128)(2,1)}, "
    "u32[]{:S(2)}) copy-start(%x)"
)
PLAIN_SEND = f"%m = ({SHARD}, u32[]{{:S(2)}}, token[]) send(%x, %t), is_host_transfer=true"


def test_what_runs_beside_the_core_is_counted_as_often_as_it_runs():
    beside = [
        GATHER.replace("(%s)", "(%x)"),
        TO_VMEM,
        TO_HOST,
        "%t = token[] after-all()",
        PLAIN_SEND,
        f"%n = {LARGE} negate(%x)",
    ]
    _, ledger = run(LOOP_BODY, computations=looped(*beside))
    once = {
        "ici": GATHER_S,
        "hbm": 2 * 4096 * 4096 / HBM_RATE,
        "host": 2 * 8192 * 8192 / MACHINE.host_bytes_per_s,
        "dcn": SHARD_BYTES / MACHINE.dcn_bytes_per_s,
    }
    assert ledger.hidden_s == {name: pytest.approx(5 * length) for name, length in once.items()}
    assert {span.name: span.times for span in ledger.spans if span.track != "core"} == {
        "g": 5, "c": 5, "o": 5, "m": 5,
    }  # fmt: skip


def test_a_span_says_what_was_moved_and_multiplied():
    copied = "bf16[4096,4096]{1,0:T(8,128)(2,1)}"
    _, ledger = run(
        [
            f"%x = {LARGE} parameter(0)",
            f"%v = {IN_VMEM} parameter(1)",
            "%t = token[] after-all()",
            f"%n = {LARGE} negate(%x)",
            GATHER.replace("(%s)", "(%x)"),
            TO_VMEM,
            f"%h = ({copied}, {copied}, u32[]{{:S(2)}}) copy-start(%x)",
            PLAIN_SEND,
            f"%r = {SHARD} all-reduce(%x), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add",
            f"ROOT %d = {IN_VMEM} dot(%v, %v), lhs_contracting_dims={{1}}, "
            "rhs_contracting_dims={0}",
        ],
        computations=FUSED_SUM,
    )
    half = 2 * 4096 * 4096
    assert [(span.track, span.name, span.flops, span.bytes) for span in ledger.spans] == [
        ("core", "n", 0, 2 * 2 * 8192 * 8192),
        ("ici xy", "g", 0, 2 * 8192 * 8192),
        ("hbm", "c", 0, half),
        ("hbm", "h", 0, 2 * half),  # within HBM it is read and written
        ("dcn", "m", 0, SHARD_BYTES),
        ("core", "r", 0, SHARD_BYTES),
        ("core", "d", 2 * 4096**3, 0),  # what lies in VMEM moves no byte of HBM
    ]
    starts = {span.name: span.start_s for span in ledger.spans}
    assert starts["n"] == 0.0
    for later in ("g", "c", "h", "m", "r"):
        assert starts[later] == pytest.approx(NEGATE_S)
    gathered = next(span for span in ledger.spans if span.name == "g")
    summed = next(span for span in ledger.spans if span.name == "r")
    assert gathered.duration_s == pytest.approx(GATHER_S)
    # 2x4: reduced over one axis after the other, gathered over both, once the links are free.
    size = SHARD_BYTES
    alone = size * (1 / 2 + 1 / 2 * 3 / 4 + 7 / 8 / 2) / 90e9 + 2 * (1 + 3) * 1e-6
    assert summed.duration_s == pytest.approx(GATHER_S + alone + OVERHEAD)
    assert ledger.seconds["ici"] == pytest.approx(summed.duration_s)
    assert ledger.hidden_s["ici"] == pytest.approx(GATHER_S + alone)


def test_a_branch_starts_where_the_program_has_come_to():
    computations = (
        f"%twice (p: bf16[8192,8192]) -> bf16[8192,8192] {{\n  %p = {LARGE} parameter(0)\n"
        f"  %m = {LARGE} negate(%p)\n  ROOT %o = {LARGE} negate(%m)\n}}\n\n"
    )
    inside = looped(
        f"%first = {LARGE} negate(%x)",
        "%which = s32[]{:T(128)} constant(0)",
        f"%n = {LARGE} conditional(%which, %first), branch_computations={{%twice}}",
    )
    head, *rest = LOOP_BODY
    before = f"%before = {LARGE} negate(%a)"
    _, ledger = run([head, before, *rest], computations=computations + inside)
    spans = {span.name: span for span in ledger.spans}
    counting = spans["next"].duration_s
    assert spans["first"].start_s == pytest.approx(NEGATE_S + counting)
    assert spans["m"].start_s == pytest.approx(2 * NEGATE_S + counting)
    assert spans["o"].start_s == pytest.approx(3 * NEGATE_S + counting)
    assert spans["o"].times == 5


def test_what_only_touches_vmem_runs_at_the_rate_of_vmem():
    seconds, ledger = run([f"%v = {IN_VMEM} parameter(0)", f"ROOT %n = {IN_VMEM} negate(%v)"])
    vmem_s = 2 * 2 * 4096 * 4096 / (1638e9 * 20)  # twenty times the rate of HBM (scaling book)
    assert seconds == pytest.approx(vmem_s + OVERHEAD)
    assert ledger.seconds == {"vector": pytest.approx(vmem_s), "overhead": pytest.approx(OVERHEAD)}


def test_a_kernel_counts_as_often_as_it_runs():
    kernel = (
        f'%n = {LARGE} custom-call(%x), custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(f)/my_kernel"}'
    )
    buffer = f'%b = {LARGE} custom-call(), custom_call_target="AllocateBuffer"'
    seconds, ledger = run(
        LOOP_BODY, computations=looped(buffer, kernel), kernel_timer=lambda kernel, parent: 0.25
    )
    assert ledger.seconds["kernel"] == 5 * 0.25
    assert seconds == pytest.approx(sum(ledger.seconds.values()))
    span = next(span for span in ledger.spans if span.name == "n")
    assert (span.duration_s, span.flops, span.bytes, span.times) == (0.25, 0, 0, 5)


def test_a_loop_of_unknown_length_runs_once_and_one_of_none_not_at_all():
    unknown = LOOP.replace("constant(5)", "get-tuple-element(%q), index=0")
    seconds, ledger = run(LOOP_BODY, computations=unknown)
    assert ledger.unknown_loops == ["loop"]
    assert ledger.seconds["hbm"] == pytest.approx(NEGATE_S - OVERHEAD, rel=1e-3)
    seconds, ledger = run(LOOP_BODY, computations=LOOP.replace("constant(5)", "constant(0)"))
    assert (seconds, ledger.spans, ledger.unknown_loops) == (0.0, [], [])


def test_a_called_computation_runs_once_and_is_no_loop():
    called = f"%f (p: bf16[8192,8192]) -> bf16[8192,8192] {{\n  %p = {LARGE} parameter(0)\n"
    called += f"  ROOT %n = {LARGE} negate(%p)\n}}\n"
    body = [f"%a = {LARGE} parameter(0)", f"ROOT %y = {LARGE} call(%a), to_apply=%f"]
    seconds, ledger = run(body, computations=called)
    assert seconds == pytest.approx(NEGATE_S)
    assert [(span.name, span.cause, span.times) for span in ledger.spans] == [("n", "hbm", 1)]


CUT = f"""%start_fusion (sa: bf16[1024,8192]) -> (bf16[1024,8192], bf16[8192,8192]) {{
  %sa = {SHARD} parameter(0)
  %mark = ({SHARD}, {LARGE}) custom-call(%sa), custom_call_target="AsyncCollectiveStart"
  ROOT %gg = {LARGE} all-gather(%sa), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}
}}

%async_collective_fusion.1 (ca: bf16[8192,8192], cb: bf16[8192,8192]) -> bf16[8192,8192] {{
  %ca = {LARGE} parameter(0)
  %cb = {LARGE} parameter(1)
  ROOT %cn = {LARGE} negate(%cb)
}}

%done_fusion (da: bf16[8192,8192]) -> bf16[8192,8192] {{
  %da = {LARGE} parameter(0)
  ROOT %end = {LARGE} custom-call(%da), custom_call_target="AsyncCollectiveDone"
}}

"""


@pytest.mark.parametrize("carriers", [0, 1, 8])
def test_a_collective_cut_into_fusions_runs_beside_those_that_carry_it(carriers):
    carried = [
        f"%c{i + 1} = {LARGE} fusion(%c{i}, %a), kind=kLoop, calls=%async_collective_fusion.1"
        for i in range(carriers)
    ]
    seconds, ledger = run(
        [
            f"%s = {SHARD} parameter(0)",
            f"%a = {LARGE} parameter(1)",
            f"%c0 = {LARGE} fusion(%s), kind=kCustom, calls=%start_fusion",
            *carried,
            f"ROOT %d = {LARGE} fusion(%c{carriers}), kind=kCustom, calls=%done_fusion",
        ],
        computations=CUT,
    )
    assert seconds == pytest.approx(max(GATHER_S, carriers * NEGATE_S))
    assert ledger.seconds["ici"] == pytest.approx(max(0.0, GATHER_S - carriers * NEGATE_S))
    assert ledger.hidden_s["ici"] == pytest.approx(GATHER_S)


def test_a_done_waits_for_its_own_collective_and_no_other():
    two = CUT.replace("%done_fusion (da: bf16[8192,8192])", "%done_fusion (da: x, db: x)")
    two = two.replace(f"  %da = {LARGE} parameter(0)\n", f"  %da = {LARGE} parameter(0)\n"
                      f"  %db = {LARGE} parameter(1)\n")  # fmt: skip
    start = f"{LARGE} fusion(%s), kind=kCustom, calls=%start_fusion"
    body = [
        f"%s = {SHARD} parameter(0)",
        f"%c = {start}",
        f"%e = {start}",  # on the same links, and so later
        f"ROOT %d = {LARGE} fusion(%c, %e), kind=kCustom, calls=%done_fusion",
    ]
    assert run(body, computations=two)[0] == pytest.approx(GATHER_S)


def test_a_fusion_that_carries_nothing_is_an_op_like_any_other():
    carrier = f"{LARGE} fusion(%a, %a), kind=kLoop, calls=%async_collective_fusion.1"
    seconds, _ = run([f"%a = {LARGE} parameter(0)", f"ROOT %c = {carrier}"], computations=CUT)
    assert seconds == pytest.approx(NEGATE_S)


def test_an_engine_drains_its_queue_in_order():
    engine = Engine(bytes_per_s=2.0)
    engine.queue += [("a", 6.0), ("b", 4.0), ("c", 2.0)]
    assert [engine.seconds_until(name) for name in ("a", "b", "c", "gone")] == [3, 5, 6, 0]
    engine.drain(1.0)
    assert engine.queue == [("a", 4.0), ("b", 4.0), ("c", 2.0)]
    engine.drain(3.0)  # all of the first, and two bytes of the next
    assert engine.queue == [("b", 2.0), ("c", 2.0)]
    engine.drain(1.0)  # exactly the next
    assert engine.queue == [("c", 2.0)]
    engine.drain(10.0)
    assert engine.queue == []


def test_a_lane_is_free_when_what_was_sent_last_has_passed():
    frame = Frame(MACHINE, parse_hlo(SMALLEST).entry, 1, 0.0)
    assert frame.occupy("ici", "a", frozenset(("x+", "y+")), 3.0) == 0.0
    frame.advance(1.0)
    assert frame.occupy("ici", "b", frozenset(("y+", "z+")), 2.0) == 3.0
    assert frame.free_at(frozenset(("x+",))) == 3.0
    assert frame.free_at(frozenset(("z+",))) == 5.0
    assert frame.free_at(frozenset(("z-",))) == 1.0  # now
    assert frame.finish("a") == ("ici", 2.0)
    frame.advance(6.0)
    assert frame.finish("b") == ("ici", 0.0)  # long over
    assert frame.free_at(frozenset(("x+",))) == 7.0


@pytest.mark.parametrize(("target", "source", "waits_for"), [("S(5)", "", 2), ("", "S(5)", 1)])
def test_what_is_sent_waits_for_what_goes_to_the_host_and_not_for_what_comes(
    target, source, waits_for
):
    shapes = [f"bf16[1024,8192]{{1,0:T(8,128)(2,1){space}}}" for space in (target, source)]
    _, ledger = run(
        [
            f"%x = {SHARD} parameter(0)",
            f"%c = ({shapes[0]}, {shapes[1]}, u32[]{{:S(2)}}) copy-start(%x)",
            "%t = token[] after-all()",
            PLAIN_SEND,
            "ROOT %sd = token[] send-done(%m)",
        ]
    )
    assert ledger.seconds["host"] == pytest.approx(waits_for * SHARD_BYTES / 56e9)


def test_a_lone_collective_is_charged_to_the_network_alone():
    alone = f"ROOT %r = {LARGE} all-reduce(%a), channel_id=1, replica_groups=[1,8]<=[8], "
    _, ledger = run([f"%a = {LARGE} parameter(0)", alone + "to_apply=%add"], computations=FUSED_SUM)
    assert set(ledger.seconds) == {"ici"}
    assert [span.cause for span in ledger.spans] == ["ici"]
    of_one = alone.replace("[1,8]", "[8,1]")  # which has nobody to wait for
    seconds, ledger = run(
        [f"%a = {LARGE} parameter(0)", of_one + "to_apply=%add"], computations=FUSED_SUM
    )
    assert seconds == pytest.approx(OVERHEAD)
    assert [span.cause for span in ledger.spans] == ["ici"]


@pytest.mark.parametrize(("summed", "cause"), [(LARGE, "ici"), (SHARD, "matrix")])
def test_a_fused_sum_is_bound_by_what_takes_longer(summed, cause):
    fused = FUSED_SUM.replace(f"%r = {LARGE}", f"%r = {summed}")
    body = [
        f"%a = {LARGE} parameter(0)",
        f"ROOT %f = {summed} fusion(%a), kind=kOutput, calls=%fused_sum",
    ]
    _, ledger = run(body, computations=fused)
    assert [span.cause for span in ledger.spans] == [cause]


def test_a_span_has_moved_and_multiplied_nothing_unless_it_says_so():
    assert TrackSpan("core", "a", 0.5, 1.5, "hbm").to_dict() == {
        "track": "core", "name": "a", "start_s": 0.5, "duration_s": 1.5, "cause": "hbm",
        "op_name": "", "flops": 0.0, "bytes": 0.0, "times": 1,
    }  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
def test_a_copy_of_two_numbers_is_a_copy(count):
    copy = f"%c = (f32[{count}]{{0:S(1)}}, f32[{count}]{{0}}, u32[]{{:S(2)}}) copy-start(%a)"
    _, ledger = run([f"%a = f32[{count}]{{0}} parameter(0)", copy])
    assert [(span.name, span.bytes) for span in ledger.spans] == [("c", 4 * count)]
