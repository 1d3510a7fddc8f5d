"""Every fitted rate moves something that is predicted, and both models count with the same ones."""

import copy
import itertools

import numpy as np
import pytest

from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.timeline import Machine, predict_step
from tpukit.compiler.timeline.kernels import SplashTimer
from tpukit.hardware import Slice, rates
from tpukit.hardware.rates import SECTIONS, rates_file
from tpukit.models import get_preset
from tpukit.planner.cost.candidates import PRECISIONS, Candidates, SliceMesh, optimizers_of
from tpukit.planner.cost.memory_model import rounds_first
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.rates import Rates
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.step_variant import OUR_STEP, StepVariant, variant_for
from tpukit.planner.cost.torus import place_axes
from tpukit.planner.planning import plan
from tpukit.planner.search.search import Search
from tpukit.planner.serving import plan_serving

# Eight devices each, and the generation whose values are the defaults.
SLICES = {"v4": "v4-16", "v5e": "v5e-8", "v5p": "v5p-16", "v6e": "v6e-8", "7x": "tpu7x-2x2x1"}
LARGE, RESIDENT = "[8192,8192]{1,0:T(8,128)(2,1)}", "[4096,4096]{1,0:T(8,128)(2,1)S(1)}"
HEADS = "bf16[8,4096,128]{2,1,0}"
PRODUCT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BETWEEN_SLICES = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="x_0",'
    '_xla_megascale_target="{0,1}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)
STATED = '{"custom_call_config":{"cost_estimate":{"flops":"1e12","bytes_accessed":"1e6"}}}'
# One of each kind of op: products, streams, copies, collectives, kernels, an exchange.
PROGRAM = f"""HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (a: bf16[8192,8192]) -> bf16[8192,8192] {{
  %a = bf16{LARGE} parameter(0)
  %v = bf16{RESIDENT} parameter(1)
  %i = s8{RESIDENT} parameter(2)
  %q = {HEADS} parameter(3)
  %s = bf16[1024,8192]{{1,0:T(8,128)(2,1)}} parameter(4)
  %streamed = bf16{LARGE} dot(%a, %a), {PRODUCT}
  %resident = bf16{RESIDENT} dot(%v, %v), {PRODUCT}
  %narrow = s32{RESIDENT} dot(%i, %i), {PRODUCT}
  %stream = bf16{LARGE} negate(%a)
  %vector = bf16{RESIDENT} negate(%v)
  %g = (bf16[1024,8192]{{1,0:T(8,128)(2,1)}}, bf16{LARGE}) all-gather-start(%s), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}
  %gd = bf16{LARGE} all-gather-done(%g)
  %o = (bf16[8192,8192]{{1,0:T(8,128)(2,1)S(5)}}, bf16{LARGE}, u32[]{{:S(2)}}) copy-start(%a)
  %od = bf16[8192,8192]{{1,0:T(8,128)(2,1)S(5)}} copy-done(%o)
  %splash_mha_fwd.1 = {HEADS} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call"
  %splash_mha_dq.1 = {HEADS} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call"
  %grouped_matmul.1 = {HEADS} custom-call(%q, %q), custom_call_target="tpu_custom_call", backend_config={STATED}
  %t = token[] after-all()
  %send = (bf16[1024,8192]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}, token[]) send(%s, %t), {BETWEEN_SLICES}
  %sd = token[] send-done(%send)
  %recv = (bf16[1024,8192]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}, token[]) recv(%t), {BETWEEN_SLICES}
  %rd = (bf16[1024,8192]{{1,0:T(8,128)(2,1)}}, token[]) recv-done(%recv)
  ROOT %end = bf16{LARGE} bitcast(%stream)
}}
"""  # noqa: E501
MODULE = parse_hlo(PROGRAM)


def devices_of(target):
    chips = itertools.product(*(range(length) for length in target.topology))
    coordinates = [chip for chip in chips for _ in range(target.chip.devices_per_chip)]
    slices = range(target.num_slices)
    return tuple(coordinates) * len(slices), tuple(one for one in slices for _ in coordinates)


def timeline(name):
    """The causes of the small program on two slices, and the band around its step."""
    target = Slice.parse(f"2x{name}")
    coordinates, slices = devices_of(target)
    step = predict_step(MODULE, target, coordinates=coordinates, slice_of_device=slices)
    return [*step.seconds_by_cause.values(), step.step_time_s, step.low_s, step.high_s]


def candidate(name, sizes, *, remat="full", precision="bf16", batch=1, moments="float32"):
    target = Slice.parse(name)
    mesh = SliceMesh(target, sizes, place_axes(target, sizes))
    column = {name: np.asarray([0]) for name in ("mesh", "remat", "optimizer")}
    return Candidates(
        meshes=(mesh,),
        batch=np.asarray([batch]),
        microbatches=np.asarray([1]),
        precision=np.asarray([PRECISIONS.index(precision)]),
        remats=(remat,),
        optimizers=optimizers_of("adamw", moments),
        **column,
    )


def modelled(model, name, sizes, *, length=8192, variant=OUR_STEP, **how):
    scores = score(
        shape_of(get_preset(model)),
        candidate(name, sizes, **how),
        sequence_length=length,
        variant=variant,
    )
    return [scores.step_time_s[0], scores.memory.total[0], scores.host_share[0]]


def arithmetic(name):
    """Steps and memory of a few models, each with something the others do not have."""
    host = "offload=decoder_layer_input,qkv_proj,out_proj"
    return [
        *modelled("llama3.1-8b", name, {"fsdp": 8}),
        *modelled("llama3.1-8b", name, {"fsdp": 8}, remat="none"),
        *modelled("llama3.1-8b", name, {"fsdp": 8}, moments="int8"),
        *modelled("llama3.1-8b", name, {"fsdp": 8}, remat=host, length=512),
        *modelled("llama3.1-8b", name, {"fsdp": 4, "tensor": 2}, precision="int8"),
        *modelled("llama3.1-8b", name, {"context": 8}, length=65536),
        *modelled("llama3.1-8b", name, {"fsdp": 8}, variant=StepVariant(attention="plain")),
        *modelled(
            "llama3.1-8b",
            name,
            {"fsdp": 8},
            precision="int8",
            variant=variant_for("int8_throughout"),
        ),
        *modelled("llama3.2-1b", name, {"fsdp": 8}),  # heads of 64
        *modelled("gemma3-12b", name, {"fsdp": 8}),  # of 256
        *modelled("mixtral-8x7b", name, {"fsdp": 8}),
        *modelled("mixtral-8x7b", name, {"fsdp": 4, "expert": 2}),
        *modelled("llama3.1-8b", f"2x{name}", {"fsdp": 8}),
        rounds_first(Slice.parse(name).chip.name),
        *(one.tokens_per_s for one in plan_serving("llama3.1-8b", generations=[name]).choices),
    ]


def choices():
    """A size for serving, and which meshes are close enough to compile both."""
    served = plan_serving("llama3.1-70b", generations=["v6e"], formats=["bf16"]).choices
    ask = plan("llama3.1-8b", tokens=1e9, on="v6e-16", verify=0, max_batch_tokens="1M").ask
    search = Search.run(ask)
    order = search.order()
    return [*(one.slice for one in served), search.rival(order, int(order[0]))]


def predicted(generation):
    name = SLICES[generation]
    return [*timeline(name), *arithmetic(name)]


def generations_read_by(key):
    return [key] if key in SLICES else ["v4", "v5p", "v6e"]


ENTRIES = [
    (section.section, name, key)
    for section in SECTIONS
    for name, entry in rates_file()[section.section].items()
    for key, value in entry.items()
    if isinstance(value, dict) and "value" in value
]
THRESHOLDS = ("resident_mib", "close_steps", "serving_headroom")


def changed_file(section, name, key):
    content = copy.deepcopy(rates_file())
    entry = content[section][name][key]
    value = entry["value"]
    if name in THRESHOLDS:
        entry["value"] = 6 * value
    elif name == "rounds_weights_first":
        entry["value"] = 1 - value
    else:
        entry["value"] = 1.1 * value or 0.1
    return content


@pytest.fixture
def with_file(monkeypatch):
    def use(content):
        monkeypatch.setattr(rates, "rates_file", lambda: content)
        rates._load.cache_clear()

    yield use
    rates._load.cache_clear()


@pytest.fixture(scope="module")
def shipped():
    return {generation: predicted(generation) for generation in SLICES}, choices()


@pytest.mark.parametrize("entry", ENTRIES, ids=".".join)
def test_every_rate_moves_a_figure(entry, with_file, shipped):
    figures, chosen = shipped
    section, name, key = entry
    with_file(changed_file(section, name, key))
    if name in ("close_steps", "serving_headroom"):
        assert choices() != chosen
    else:
        assert any(predicted(one) != figures[one] for one in generations_read_by(key))


@pytest.mark.parametrize("generation", SLICES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_planner_and_timeline_count_attention_with_the_same_share(generation, head_dim):
    name = SLICES[generation]
    machine = Machine.of(Slice.parse(name))
    heads = f"bf16[8,4096,{head_dim}]{{2,1,0}}"
    text = (
        f"HloModule jit_f, is_scheduled=true\n\nENTRY %main (q: {heads}) -> {heads} {{\n"
        f"  %q = {heads} parameter(0)\n  ROOT %splash_mha_fwd.1 = {heads} custom-call(%q, %q, %q), "
        'custom_call_target="tpu_custom_call"\n}\n'
    )
    entry = parse_hlo(text).entry
    timer = SplashTimer(machine)
    seconds = timer(entry.root, entry) / timer.over_measured("fwd")
    flops = 2 * 2 * 8 * 4096 * 4096 * head_dim * 0.5  # causal, by halves where no table says
    reached = flops / (machine.peak_flops("bf16") * seconds / machine.op_time_in_a_step)
    array = Rates.of(candidate(name, {"fsdp": 8}), head_dims=[head_dim]).attention_share
    assert array[head_dim][0] == pytest.approx(reached)


def rates_on(name, sizes, *, precision="bf16", head_dim=128):
    return Rates.of(candidate(name, sizes, precision=precision), head_dims=[head_dim])


@pytest.mark.parametrize(
    ("name", "precision", "time", "gradient_time"),
    [
        ("v6e-8", "bf16", 1, 1),
        (
            "v6e-8",
            "int8",
            918 / 1836 / 0.72,
            918 / 1836 / 0.72,
        ),  # .72 of the peak that bf16 reaches
        ("v5e-8", "int8", 197 / 393, 1),  # gradients of weights gain nothing
        ("tpu7x-2x2x1", "fp8", 1 / 2, 1 / 2),
    ],
)
def test_narrow_products_take_as_much_less_as_their_peak_is_higher(
    name, precision, time, gradient_time
):
    found = rates_on(name, {"fsdp": 8}, precision=precision)
    assert found.narrow_time[0] == pytest.approx(time, rel=1e-9)
    assert found.narrow_gradient_time[0] == pytest.approx(gradient_time, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "sizes", "times"),
    [
        ("v5p-128", {"fsdp": 64}, 2),  # the compiler makes sums of every gather
        ("v5p-128", {"fsdp": 32, "tensor": 2}, 1),
        ("v5p-8", {"fsdp": 4}, 1),  # 2x2x1 is flat
        ("v6e-64", {"fsdp": 64}, 1),
    ],
)
def test_gathers_along_a_whole_torus_move_more(name, sizes, times):
    assert rates_on(name, sizes).gather_bytes[0] == times


def test_links_of_an_axis_by_hand():
    axes = rates_on("v6e-256", {"fsdp": 256}).axes  # 16x16, two rings
    fsdp = axes["fsdp"]
    assert fsdp.bytes_per_s[0] == 4 * 90e9
    assert fsdp.share[0] == 255 / 256
    assert fsdp.latency_s[0] == pytest.approx(16e-6)
    assert fsdp.all_to_all[0] == pytest.approx(16 / 8 / 90e9)
    unused = axes["tensor"]
    assert (unused.share[0], unused.latency_s[0], unused.all_to_all[0]) == (0, 0, 0)
    once = fsdp.gather_s(np.asarray([360e9]))[0]
    assert once == pytest.approx(255 / 256 + 16e-6)
    assert fsdp.reduce_s(np.asarray([360e9]))[0] == pytest.approx(2 * once)
    assert fsdp.gather_s(np.asarray([360e9]), times=3.0)[0] == pytest.approx(3 * once)
    line = rates_on("v6e-8", {"fsdp": 2, "tensor": 4}).axes["tensor"]  # 2x4, no ring
    assert line.bytes_per_s[0] == 90e9
    assert line.latency_s[0] == pytest.approx(3e-6)
    assert line.all_to_all[0] == pytest.approx(4 / 4 / 90e9)


def test_slices_wait_for_the_slowest_with_every_doubling():
    one, eight = (rates_on(name, {"fsdp": 8}).waiting_share[0] for name in ("v6e-8", "8xv6e-8"))
    assert one == 0
    assert eight == pytest.approx(3 * 0.026)


def test_rates_are_those_of_the_device_in_a_step():
    found = rates_on("v6e-8", {"fsdp": 8})
    assert found.bf16_flops_per_s[0] == 918e12
    assert found.matrix_share[0] == pytest.approx(0.85 / 0.95)
    assert found.streamed_share[0] == pytest.approx(0.72 / 0.95)
    assert found.hbm_bytes_per_s[0] == pytest.approx(1638e9 * 0.83 / 0.95)
    assert found.resident_bytes[0] == 48 * 2**20
    half = rates_on("tpu7x-2x2x1", {"fsdp": 8})  # a device is half a chip
    assert half.bf16_flops_per_s[0] == 2307e12 / 2
    assert half.hbm_bytes_per_s[0] == pytest.approx(7380e9 / 2 * 0.87 / 0.95)
    assert half.host_bytes_per_s[0] == pytest.approx(56e9 / 2)
