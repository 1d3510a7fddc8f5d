"""Physics of plans: whatever is asked, no figure passes a roof, and worse never comes out better.

Roofs are taken from the catalog's stated figures, not from the rates that the model counts with.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tpukit.hardware import Slice, public_prices
from tpukit.hardware.catalog import dcn_rate
from tpukit.models import TransformerConfig, get_preset
from tpukit.planner.cost.candidates import (
    LEAST_CONTEXT_TOKENS,
    PRECISIONS,
    Space,
    enumerate_candidates,
)
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.money import SPOT, Market, Preemption, cost_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.serving_model import (
    ServedFormats,
    ServedModel,
    Server,
    ServingTraffic,
    servers_on,
)
from tpukit.planner.cost.step_variant import CAUSES
from tpukit.planner.planning import plan
from tpukit.planner.search.objectives import PlanLimits, judge

ONE_SLICE = (
    *("v3-32", "v4-32", "v5e-4", "v5e-64", "v5p-32", "v5p-256", "v6e-1", "v6e-16", "v6e-256"),
    *("tpu7x-2x2x1", "tpu7x-4x4x4"),
)
SLICES = (*ONE_SLICE, "2xv3-128", "2xv4-128", "4xv5e-256", "2xv6e-256", "2xv5p-512")
LENGTHS = tuple(2**power for power in range(7, 17))
NEARLY = 1 + 1e-9


@st.composite
def models(draw, *, experts=True):
    """Transformers of any proportions that a mesh can split."""
    head_dim = draw(st.sampled_from([64, 128, 256]))
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 4, 8]))
    mixture = experts and draw(st.booleans())
    return TransformerConfig(
        name="drawn",
        n_layers=draw(st.sampled_from([1, 4, 12, 48, 96])),
        d_model=128 * draw(st.integers(1, 96)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=128 * draw(st.integers(1, 256)),
        vocab_size=1000 * draw(st.integers(1, 256)),
        max_seq_len=2**17,
        tied_embeddings=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 512, 4096])),
        n_experts=8 if mixture else 0,
        experts_per_token=2 if mixture else 0,
    )


def scored(config, on, length, *, precisions=("bf16",), max_batch_tokens=2.0**24):
    """Every candidate of a slice."""
    shape = shape_of(config)
    able = [name for name in precisions if name == "bf16" or Slice.parse(on).chip.multiplies(name)]
    space = Space(generations=[on], precisions=able)
    candidates = enumerate_candidates(
        shape, space, sequence_length=length, max_batch_tokens=max_batch_tokens
    )
    assume(len(candidates))
    return score(shape, candidates, sequence_length=length)


def cheap(function):
    return settings(max_examples=50, deadline=None)(function)


@cheap
@given(models(), st.sampled_from(SLICES), st.sampled_from(LENGTHS))
def test_no_step_passes_a_roof_and_every_total_is_the_sum_of_its_parts(config, on, length):
    found = scored(config, on, length, precisions=("bf16", "int8", "fp8"))
    target, chip, candidates = Slice.parse(on), Slice.parse(on).chip, found.candidates
    step, memory, sizes = found.step_time_s, found.memory, candidates.sizes

    flops = config.flops_per_token(length).total * found.tokens_per_step
    peaks = [chip.peak(name).value or 0.0 for name in PRECISIONS]
    peak = np.asarray(peaks)[candidates.precision] * 1e12 * target.chips
    assert (flops / step <= peak).all(), "FLOPs"

    hbm = chip.per_device(chip.hbm_gbps).value * 1e9
    updated = 2 * (memory.weights + memory.optimizer)  # read and written once a step
    assert (updated / hbm <= step).all(), "HBM"

    links = (chip.ici_links_per_chip or 0) * chip.ici_link_gbps.value * 1e9
    ways = sizes["fsdp"] / chip.devices_per_chip
    layers = (found.memory.weights / 4 * sizes["fsdp"]) * np.maximum(0, 1 - 1 / ways)
    gathered = layers - shape_of(config).outside_parameters  # a byte a weight, once
    assert (gathered / links <= step).all(), "links between chips"

    between = chip.per_device(dcn_rate(chip)).value * 1e9
    summed = memory.weights / 4 * 2 * (target.num_slices - 1) / target.num_slices
    assert (summed / between <= step * NEARLY).all(), "network between slices"

    pcie = chip.per_device(chip.pcie_gbps).value * 1e9
    alone = sizes["stage"] == 1
    offloaded = memory.host * candidates.microbatches * alone
    assert (offloaded / pcie <= step * NEARLY).all(), "host link"

    causes = [getattr(found.step, cause) for cause in CAUSES]
    assert step == pytest.approx(sum(causes))
    parts = memory.to_dict()
    total = parts.pop("total")
    host = parts.pop("host")
    assert total == pytest.approx(sum(parts.values()))
    for amount in (*causes, *parts.values(), host):
        assert (np.asarray(amount) >= 0).all()


@cheap
@given(models(), st.sampled_from(SLICES), st.sampled_from(LENGTHS))
def test_what_is_accepted_fits_into_devices_and_hosts(config, on, length):
    found = scored(config, on, length)
    market = Market(public_prices())
    verdicts = judge(found, cost_of(found, market, tokens=1e9), PlanLimits(min_headroom=0.0))
    chip, passed = Slice.parse(on).chip, verdicts.passed
    assert (found.memory.total[passed] <= chip.per_device(chip.hbm_usable_bytes).value).all()
    ram = chip.host_ram_bytes.value
    if ram is None:
        assert (found.memory.host[passed] == 0).all()
    else:
        held = (found.memory.host + found.memory.weights + found.memory.optimizer)[passed]
        of_host = held * chip.devices_per_chip * (chip.chips_per_host or 1)
        assert (of_host <= ram).all()


@cheap
@given(models(), st.sampled_from(SLICES), st.sampled_from(LENGTHS[:-1]))
def test_a_step_never_takes_less_time_when_only_its_work_grows(config, on, length):
    base = scored(config, on, length, max_batch_tokens=math.inf)
    candidates, shape = base.candidates, shape_of(config)

    def again(candidates=candidates, shape=shape, length=length):
        return score(shape, candidates, sequence_length=length).step_time_s

    assert (again(replace(candidates, batch=2 * candidates.batch)) >= base.step_time_s).all()
    assert (again(length=2 * length) * NEARLY >= base.step_time_s).all()
    deeper = shape_of(config.replace(n_layers=2 * config.n_layers))
    wider = shape_of(config.replace(d_ff=2 * config.d_ff))
    assert (again(shape=deeper) >= base.step_time_s).all()
    assert (again(shape=wider) >= base.step_time_s).all()


@cheap
@given(models(), st.sampled_from(SLICES), st.sampled_from(LENGTHS[:-1]))
def test_the_best_plan_never_gets_faster_when_only_sequences_grow(config, on, length):
    def least_s_per_token(length):
        found = scored(config, on, length)
        costs = cost_of(found, Market(public_prices()), tokens=1e15)
        fits = judge(found, costs, PlanLimits(min_headroom=0.0)).fits
        return (found.step_time_s / found.tokens_per_step)[fits].min(initial=math.inf)

    shorter, longer = least_s_per_token(length), least_s_per_token(2 * length)
    assert math.isfinite(shorter) or math.isinf(longer), "what holds long examples holds short ones"
    if 2 * length < 2 * LEAST_CONTEXT_TOKENS:  # longer ones have an axis more
        assert shorter <= longer * NEARLY


@cheap
@given(
    config=models(),
    on=st.sampled_from(SLICES),
    per_day=st.floats(0, 400),
    recovery_s=st.floats(0, 3600),
    more=st.floats(1, 3),
    tokens=st.floats(1e6, 1e15),
)
def test_time_and_money_never_fall_when_only_waste_or_work_grows(
    config, on, per_day, recovery_s, more, tokens
):
    found = scored(config, on, 4096)

    def costs(tokens=tokens, **changed):
        preemption = Preemption(**{"per_slice_day": per_day, "recovery_s": recovery_s, **changed})
        market = Market(public_prices(), tier=SPOT, preemption=preemption)
        return cost_of(found, market, tokens=tokens)

    base = costs()
    always = cost_of(found, Market(public_prices(), tier="on_demand"), tokens=tokens)
    assert (base.days * NEARLY >= always.days).all(), "spot is never faster than what is not lost"
    for worse in (
        costs(per_slice_day=min(1440.0, more * per_day)),
        costs(recovery_s=more * recovery_s),
        costs(tokens=min(1e17, more * tokens)),
    ):
        assert (worse.days * NEARLY >= base.days).all()
        assert (worse.chip_hours * NEARLY >= base.chip_hours).all()
        priced = base.priced & worse.priced
        assert (worse.usd[priced] * NEARLY >= base.usd[priced]).all()
        assert not (worse.finishes & ~base.finishes).any()
    ends = base.finishes
    hours = base.days[ends] * 24 * found.candidates.chips[ends]
    assert base.chip_hours[ends] == pytest.approx(hours)


@cheap
@given(models(), st.sampled_from(["v5e", "v5p", "v6e", "7x"]), st.sampled_from([512, 4096]))
def test_more_chips_never_need_more_memory_each(config, generation, length):
    shape = shape_of(config)
    space = Space(generations=[generation], max_chips=256, multi_slice=False)
    candidates = enumerate_candidates(shape, space, sequence_length=length, max_batch_tokens=2**24)
    found = score(shape, candidates, sequence_length=length)
    counts = np.unique(candidates.chips)
    least = [found.memory.total[candidates.chips == chips].min() for chips in counts]
    assert least == sorted(least, reverse=True)


@settings(max_examples=12, deadline=None)
@example(
    config=get_preset("llama3.2-1b", n_layers=24),
    on="v5e-4",
    objective="fewest-chips",
    spot=False,
    tokens=1e14,
)
@given(
    config=models(),
    on=st.sampled_from(SLICES),
    objective=st.sampled_from(["cheapest", "fastest", "fewest-chips"]),
    spot=st.booleans(),
    tokens=st.floats(1e8, 1e14),
)
def test_every_figure_of_a_choice_follows_from_its_parts(config, on, objective, spot, tokens):
    found = plan(
        config, tokens=tokens, on=on, objective=objective, spot=spot, sequence_length=2048, verify=0
    )
    for choice in (*found.choices, *found.front, *found.unpriced):
        chip = choice.slice.chip
        assert sum(choice.seconds_by_cause.values()) == pytest.approx(choice.step_time_s)
        assert choice.steps * choice.tokens_per_step >= tokens
        assert (choice.steps - 1) * choice.tokens_per_step < tokens
        useful = choice.steps * choice.step_time_s
        assert choice.days * 86_400 * (1 - choice.waste) == pytest.approx(useful)
        assert choice.chip_hours == pytest.approx(choice.days * 24 * choice.slice.chips)
        price = choice.usd_per_chip_hour
        if price.value is not None:
            assert choice.usd.value == pytest.approx(choice.chip_hours * price.value)
            assert (choice.usd.origin, price.origin) == ("model", "third-party")
        peak = chip.peak(choice.mfu_peak).value * choice.slice.chips
        assert choice.mfu * peak * 1e12 * choice.step_time_s == pytest.approx(choice.model_flops)
        assert 0 < choice.mfu <= 1
        assert choice.extrapolates == (choice.mfu > (choice.most_measured.value or 0.0))
        assert choice.host_bytes <= (chip.host_ram_bytes.value or math.inf)
        assert choice.job.slice == choice.slice
    if found.feasible and objective != "fewest-chips" and found.best.usd.value is not None:
        assert found.best in found.front


SERVED = ServedFormats()


@cheap
@given(
    config=models(),
    on=st.sampled_from(SLICES),
    weights=st.sampled_from(["bf16", "int8", "fp8", "int4", "vq"]),
    cache=st.sampled_from(["bf16", "fp8"]),
    activations=st.sampled_from(["bf16", "int8", "fp8"]),
    batch=st.integers(1, 100_000),
    prompt=st.integers(1, 2**16),
    new=st.integers(1, 2**16),
)
def test_no_server_passes_a_roof(config, on, weights, cache, activations, batch, prompt, new):
    model, target = ServedModel.of(config), Slice.parse(on)
    chip, traffic = target.chip, ServingTraffic(batch=batch, prompt=prompt, new=new)
    formats = ServedFormats(weights=weights, cache=cache, activations=activations)
    servers = list(servers_on(target, model, traffic, formats))
    assume(servers)
    for server in servers:
        assert server.tensor * server.replicas == target.devices
        assert server.room_for >= batch
        usable = chip.hbm_usable_bytes.value * target.chips
        copies = server.replicas * model.weight_bytes(weights)
        assert copies + batch * model.cache_bytes(traffic.context, cache) <= usable
        decode, prefill = server.decode(), server.prefill()
        peak = target.peak_tflops(formats.multiplied(target)).value * 1e12
        weighed = 2 * config.parameter_count().matmul_active
        for one in (decode, prefill):
            assert one.tokens_per_s * weighed <= peak
            parts = one.flops + one.hbm + one.network + one.starts
            assert one.seconds == pytest.approx(parts)
            assert one.tokens_per_s * one.seconds == pytest.approx(one.tokens)
        hbm = chip.hbm_gbps.value * 1e9 * target.chips
        read = batch * model.bytes_attended(traffic.mean_context, cache)
        assert read / decode.seconds <= hbm
        assert server.replicas * model.bytes_read(weights, 1) / decode.seconds <= hbm
        both = server.throughput()
        assert both.tokens_per_s <= decode.tokens_per_s
        assert both.tokens_per_s * prompt / new <= prefill.tokens_per_s * NEARLY


@cheap
@given(
    config=models(),
    on=st.sampled_from(ONE_SLICE),
    batch=st.integers(1, 10_000),
    prompt=st.integers(1, 2**15),
    new=st.integers(1, 2**15),
)
def test_serving_more_never_takes_less_time(config, on, batch, prompt, new):
    model, target = ServedModel.of(config), Slice.parse(on)
    traffic = ServingTraffic(batch=batch, prompt=prompt, new=new)
    for tensor in {1, target.devices}:
        base = Server(model, target, traffic, tensor, SERVED)
        fuller = replace(base, traffic=replace(traffic, batch=2 * batch))
        longer = replace(base, traffic=replace(traffic, prompt=2 * prompt))
        for worse in (fuller, longer):
            assert worse.decode().seconds * NEARLY >= base.decode().seconds
            assert worse.device_bytes >= base.device_bytes
            assert worse.throughput().token_s * NEARLY >= base.throughput().token_s
        assert longer.prefill().seconds * NEARLY >= base.prefill().seconds
        assert longer.throughput().tokens_per_s <= base.throughput().tokens_per_s * NEARLY
        narrower = replace(base, formats=replace(SERVED, cache="fp8"))
        assert narrower.throughput().tokens_per_s * NEARLY >= base.throughput().tokens_per_s
        assert narrower.room_for >= base.room_for
