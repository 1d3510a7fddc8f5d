"""Limits and objectives over a handful of candidates whose figures are given."""

import numpy as np
import pytest

from tpukit.errors import ConfigError
from tpukit.hardware import Figure, Slice
from tpukit.models import get_preset
from tpukit.planner.cost.candidates import Candidates, SliceMesh, optimizers_of
from tpukit.planner.cost.memory_model import MemorySplit, MeshRoles, estimate_memory_bytes
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.money import Costs, Market, Preemption, cost_of
from tpukit.planner.cost.scoring import Scores, score
from tpukit.planner.cost.step_variant import StepSplit
from tpukit.planner.cost.torus import place_axes
from tpukit.planner.search.objectives import (
    PlanLimits,
    bins,
    judge,
    ranked,
    read_objective,
    unusual,
)

GIB = 2**30


def mesh(sizes, *, on="v6e-8", joined_by="data"):
    target = Slice.parse(on)
    return SliceMesh(target, sizes, place_axes(target, sizes), joined_by)


def candidates(*meshes, **columns):
    """One candidate a mesh, or of the first as many as the columns are long."""
    count = max([len(meshes), *map(len, columns.values())])
    zero = np.zeros(count, int)
    usual = {"mesh": np.arange(count) if len(meshes) > 1 else zero, "batch": zero + 1}
    usual |= {"microbatches": zero + 1, "remat": zero, "precision": zero, "optimizer": zero}
    given = {name: np.asarray(values) for name, values in columns.items()}
    return Candidates(meshes, **{**usual, **given})


def scores(some, *, host=0.0, total=1.0, state=0.0, room=np.nan, saved_bytes=0.0):
    ones = np.ones(len(some))
    nothing = dict.fromkeys(("gradients", "activations", "temporaries"), 0 * ones)
    memory = MemorySplit(
        weights=0 * ones + state,
        optimizer=ones * total - state,
        host=ones * host,
        **nothing,
    )
    step = StepSplit(*(ones if cause == 0 else 0 * ones for cause in range(7)))
    need = ones * (total + host)
    saved = ones * saved_bytes
    return Scores(some, memory, 2 * ones, ones * room, need, step, ones, 100 * ones, saved)


def costs(*, days, usd=None, hours=None):
    days = np.asarray(days, float)
    unknown = np.full(len(days), np.nan)
    return Costs(
        days=days,
        chip_hours=unknown if hours is None else np.asarray(hours, float),
        usd=unknown if usd is None else np.asarray(usd, float),
        waste=np.zeros(len(days)),
        save_s=np.zeros(len(days)),
        write_s=np.zeros(len(days)),
        quotes={},
    )


def test_each_limit_lets_through_what_just_meets_it():
    some = candidates(mesh({"fsdp": 8}), batch=[1, 1, 1])
    shares = np.asarray([0.9, 0.95, 0.951])
    found = scores(some, total=2 * shares)
    verdict = judge(found, costs(days=[1, 2, 3], usd=[30, 20, 10]), PlanLimits())
    assert verdict.fits_device.tolist() == [True, True, False]  # 5 % stay free
    assert verdict.in_time.all()
    assert verdict.affordable.all()
    limits = PlanLimits(deadline_days=2.0, budget_usd=20.0, min_headroom=0.1)
    verdict = judge(found, costs(days=[1, 2, 3], usd=[30, 20, 10]), limits)
    assert verdict.fits_device.tolist() == [True, False, False]
    assert verdict.in_time.tolist() == [True, True, False]
    assert verdict.affordable.tolist() == [False, True, True]
    assert not verdict.passed.any()
    endless = judge(found, costs(days=[1, np.inf, 3]), PlanLimits(min_headroom=0.0))
    assert endless.finishes.tolist() == [True, False, True]
    assert endless.runs.tolist() == [True, False, True]
    unpriced = judge(found, costs(days=[1, 1, 1]), PlanLimits(budget_usd=1e9))
    assert not unpriced.affordable.any()


@pytest.mark.parametrize(
    ("host", "room", "share"),
    [
        (40.0, 100.0, 0.6),  # beside weights and optimizer on their way to a checkpoint
        (80.0, 100.0, 1.0),
        (0.0, np.nan, 0.0),
        (1.0, np.nan, np.inf),  # nobody knows whether there is room
    ],
)
def test_a_host_holds_what_is_offloaded_beside_the_state(host, room, share):
    found = scores(candidates(mesh({"fsdp": 8})), host=host, room=room, total=20.0, state=15.0)
    assert found.host_share[0] == pytest.approx(share)
    assert judge(found, costs(days=[1]), PlanLimits()).fits_host[0] == (share <= 1)
    assert found.memory_share[0] == 10.0


@pytest.mark.parametrize(
    ("objective", "priced", "best"),
    [
        ("cheapest", True, 0),
        ("cheapest", False, 1),
        ("fastest", True, 2),
        ("fewest-chips", True, 3),
    ],
)
def test_an_objective_puts_first_what_it_asks_for(objective, priced, best):
    some = candidates(*(mesh({"fsdp": size}, on=f"v6e-{size}") for size in (8, 16, 64, 4)))
    found = costs(days=[8, 8, 2, 9], usd=[1, 2, 8, 9], hours=[5, 1, 9, 7])
    whole = ranked(np.ones(4, bool), objective, scores(some), found, priced=priced)
    assert whole[0] == best
    without = ranked(np.arange(4) != best, objective, scores(some), found, priced=priced)
    assert len(without) == 3
    assert best not in without


def test_among_equals_the_plainer_wins_and_then_the_emptier():
    some = candidates(mesh({"fsdp": 8}), microbatches=[2, 1, 1])
    found = scores(some, total=np.asarray([0.1, 1.0, 0.5]))
    money = costs(days=[1, 1, 1], usd=[100.0, 100.1, 100.1])
    order = ranked(np.ones(3, bool), "cheapest", found, money, priced=True)
    assert order.tolist() == [2, 1, 0]  # a tenth of a per cent is no difference


def test_values_a_per_cent_apart_are_in_different_bins():
    apart = np.append(1.0, 1.01 ** np.arange(1, 50) * 1.005)
    assert np.diff(bins(apart)).tolist() == [1] * 49
    for least in (1.0, 1.0051, 873.2):  # wherever the least lies, the first bin begins with it
        assert bins(least * np.asarray([1.0, 1.0001, 1.0099, 1.0101])).tolist() == [0, 0, 0, 1]
    assert bins(np.asarray([np.inf, np.inf])).tolist() == [np.inf, np.inf]
    assert bins(np.asarray([np.inf, 3.0])).tolist() == [np.inf, 0]
    assert np.isnan(bins(np.asarray([np.nan, 2.0]))[0])


@pytest.mark.parametrize(
    ("sizes", "how", "columns", "complications"),
    [
        ({"fsdp": 8}, {}, {}, 0),
        ({"data": 2, "fsdp": 4}, {}, {}, 0),
        ({"tensor": 2, "fsdp": 4}, {}, {}, 1),
        ({"tensor": 2, "expert": 2, "context": 2}, {}, {}, 3),
        ({"stage": 2, "fsdp": 4}, {}, {"microbatches": [4]}, 2),
        ({"fsdp": 8}, {}, {"precision": [1]}, 1),
        ({"fsdp": 8}, {}, {"optimizer": [1]}, 1),
        ({"fsdp": 8}, {"on": "2xv6e-8"}, {}, 0),
        ({"fsdp": 8}, {"on": "2xv6e-8", "joined_by": "fsdp"}, {}, 1),
    ],
)
def test_complications_are_counted(sizes, how, columns, complications):
    some = candidates(mesh(sizes, **how), **columns)
    assert unusual(scores(some)).tolist() == [complications]
    assert unusual(scores(some, host=1.0)).tolist() == [complications + 1]


def test_limits_are_numbers_above_nothing():
    for name in ("deadline_days", "budget_usd"):
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            PlanLimits(**{name: 0})
        assert getattr(PlanLimits(**{name: 0.01}), name) == 0.01
    with pytest.raises(ConfigError, match=r"accepted are 0 to 0\.99 of HBM"):
        PlanLimits(min_headroom=1.0)
    assert PlanLimits(min_headroom=0.99).min_headroom == 0.99
    assert PlanLimits(min_headroom=0).min_headroom == 0


@pytest.mark.parametrize(
    ("limits", "objective"),
    [
        ({}, "cheapest"),
        ({"budget_usd": 1.0}, "fastest"),
        ({"deadline_days": 1.0}, "cheapest"),
        ({"budget_usd": 1.0, "deadline_days": 1.0}, "cheapest"),
    ],
)
def test_limits_say_what_is_left_open(limits, objective):
    assert read_objective(None, PlanLimits(**limits)) == objective
    assert read_objective("fewest chips", PlanLimits(**limits)) == "fewest-chips"


class Book:
    """A price book with one price, or none."""

    def __init__(self, **usd):
        self.usd = usd

    def quote(self, on, *, region="", tier):
        usd = self.usd.get(region.replace("-", "_") or "anywhere")
        if usd is None:
            return Figure.missing("USD/chip-h", f"nobody offers {region}")
        return Figure(usd, "USD/chip-h", "user", "a test", date="2026-11-16")

    def cheapest_region(self, on, *, tier):
        return min(self.usd, key=self.usd.get, default=None)


def test_a_run_is_whole_steps_of_all_its_chips():
    some = candidates(mesh({"fsdp": 8}), mesh({"fsdp": 8}, on="2xv6e-8"))
    found = scores(some)  # 100 tokens and a second a step
    whole = cost_of(found, Market(Book(anywhere=2.0)), tokens=100 * 3600 * 24)
    assert whole.days.tolist() == [1.0, 1.0]
    assert whole.chip_hours.tolist() == [24 * 8, 24 * 16]
    assert whole.usd.tolist() == [24 * 8 * 2, 24 * 16 * 2]
    assert whole.priced.all()
    assert whole.finishes.all()
    more = cost_of(found, Market(Book()), tokens=100 * 3600 * 24 + 1)
    assert more.days[0] == pytest.approx(1 + 1 / 86_400, rel=1e-9)  # one step more
    assert np.isnan(more.usd).all()
    assert not more.priced.any()


def test_spot_takes_as_much_longer_as_it_wastes():
    some = candidates(mesh({"fsdp": 8}), mesh({"fsdp": 8}, on="2xv6e-8"))
    found = scores(some, total=112e9, state=56e9, saved_bytes=896e9)
    spot = Preemption(per_slice_day=4.0, recovery_s=600.0, store_bytes_per_s=8e9)
    market = Market(Book(anywhere=1.0), tier="spot", preemption=spot)
    costs = cost_of(found, market, tokens=100 * 86_400)
    assert costs.save_s == pytest.approx(2.0)  # 112 GB over the 56 of the host link
    for index, slices in enumerate((1, 2)):
        assert costs.write_s[index] == 112.0  # 896 GB at 8 a second
        waste = float(spot.waste(2.0, slices, write_s=112.0, step_s=1.0))
        assert 0 < waste < 1
        assert costs.waste[index] == pytest.approx(waste)
        assert costs.days[index] == pytest.approx(1 / (1 - waste))
    lost = Market(Book(anywhere=1.0), tier="spot", preemption=Preemption(per_slice_day=1000))
    never = cost_of(found, lost, tokens=100)
    assert np.isinf(never.days).all()
    assert not never.finishes.any()


def test_of_the_regions_allowed_the_cheapest_is_quoted():
    on = Slice.parse("v6e-8")
    book = Book(us_east5=3.0, europe_west4=2.0, asia_east1=4.0)
    price, region = Market(book, regions=("us-east5", "europe-west4", "mars-1")).quote(on)
    assert (price.value, region) == (2.0, "europe-west4")
    nothing, region = Market(book, regions=("mars-1", "mars-2")).quote(on)
    assert (nothing.value, region) == (None, None)
    assert "mars-1" in nothing.reason


@pytest.mark.parametrize(
    ("precision", "optimizer", "pieces", "joined_by"),
    [(0, 0, 1, "data"), (1, 0, 1, "data"), (0, 1, 4, "data"), (0, 0, 1, "fsdp")],
)
def test_scores_are_those_of_the_memory_model(precision, optimizer, pieces, joined_by):
    shape = shape_of(get_preset("llama3.1-8b"))
    some = Candidates(
        (mesh({"fsdp": 4, "data": 2}, on="2xv6e-8", joined_by=joined_by),),
        *(np.asarray([value]) for value in (0, 3, pieces, 0, precision, optimizer)),
        remats=("full",),
        optimizers=optimizers_of("adamw"),
    )
    found = score(shape, some, sequence_length=2048)
    # In bfloat16 is the first moment alone. Two slices hold a copy each, or one together.
    roles = {"fsdp": 4, "data": 4} if joined_by == "data" else {"fsdp": 8, "data": 2}
    expected = estimate_memory_bytes(
        shape, MeshRoles(**roles), per_device_batch=3 * pieces, sequence_length=2048,
        optimizer_bytes=(8, 6)[optimizer], microbatches=pieces, whole_copy=True,
        eight_bits=bool(precision),
    )  # fmt: skip
    assert found.memory.total[0] == pytest.approx(float(expected.total))
    assert found.usable_bytes[0] == 31.25 * GIB
    assert found.host_room_bytes[0] == pytest.approx(0.9 * 720e9 / 4)  # of a host's four chips
    assert found.tokens_per_step[0] == 3 * pieces * 16 * 2048
    assert found.step_time_s[0] == pytest.approx(sum(found.step.at(0).values()))
    each = 4 + (8, 6)[optimizer]  # of a parameter and its states, once
    assert found.saved_bytes[0] == shape.parameters * each
