"""What one pass does, and that nothing is leaked or doubled wherever it ends."""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_provider import IN_MEMORY, Killed, ScriptedProvider

from tpukit.errors import ConfigError, PodUnavailable, ProviderError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import PodConfig, PodState, Tier
from tpukit.pods.reconciler import KEEPERS, LATE_S, LOCK, Reconciler
from tpukit.pods.store import ProviderRecord, Store
from tpukit.pods.store.locks import holding

ZONES = ("us-central1-a", "us-central1-b", "us-east5-b")
A, B, C = ZONES
CONFIG = PodConfig(tpu_type="v6e-8", zones=ZONES, queue_timeout_s=100)
GCP = ProviderRecord.of("gcp", LaunchSettings(project="p"))


class World:
    """A store, a provider in memory, a clock, and reconcilers that may die."""

    def __init__(self, folder, provider=None):
        self.at = 1e9
        self.folder = folder
        self.provider = provider or ScriptedProvider()
        self.store = Store(folder, now=lambda: self.at)
        self.start()

    def start(self):
        self.reconciler = Reconciler(self.store, opener=lambda _: self.provider, width=1)

    def pass_once(self):
        """One pass of a reconciler; a new one comes when it is killed."""
        try:
            return self.reconciler.run_pass()
        except Killed:
            self.store.close()
            self.store = Store(self.folder, now=lambda: self.at)
            self.start()
            return None

    def want(self, name, config=CONFIG):
        return self.store.wanted.want(name, config, GCP)

    def has_asked(self, pod, zone):
        """Let the store remember that it asked for a pod."""
        self.store.history.asked(GCP.id, CONFIG, zone=zone, pod=pod)

    def events(self, run):
        return [event.kind for event in self.store.events(run)]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.store.close()


def test_what_is_wanted_is_made_once(world):
    world.want("run")
    report = world.pass_once()
    (pod,) = world.provider.live()
    assert (pod.name, pod.zone) == ("run-a1", A)
    assert dict(pod.labels) == {"owner": world.store.owner, "job": "run", "attempt": "1"}
    assert (report.created, report.ready) == (["run-a1"], ["run"])
    assert world.pass_once().created == []
    assert world.provider.calls == ["list", f"create run-a1 in {A}", "list"]


def test_a_zone_without_stock_is_passed_over_at_once(world):
    world.provider.empty = {A, B}
    world.want("run")
    world.pass_once()
    assert [pod.zone for pod in world.provider.live()] == [C]
    assert world.events("run") == ["refused", "refused", "asked", "ready"]
    world.want("second")
    world.provider.empty = set()
    world.pass_once()
    assert world.provider.live("second")[0].zone == C, "A and B refused a moment ago"
    world.at += 601
    world.want("third")
    world.pass_once()
    assert world.provider.live("third")[0].zone == A, "and are forgiven by now"


def test_all_zones_empty_is_said_and_tried_again(world):
    world.provider.empty = {*ZONES}
    world.want("run")
    assert isinstance(world.pass_once().errors["run"], PodUnavailable)
    world.provider.empty = {A, B}
    assert world.pass_once().created == ["run-a1"]


def test_a_lost_reply_gives_one_pod(world):
    world.want("run")
    world.provider.script = ["ok", "lose"]
    assert isinstance(world.pass_once().errors["run"], ProviderError)
    assert world.pass_once().ready == ["run"]
    assert [pod.name for pod in world.provider.pods.values()] == ["run-a1"]


@pytest.mark.parametrize("moment", range(3))
@pytest.mark.parametrize("fault", ["die", "die after"])
def test_the_next_reconciler_takes_over_what_was_made(world, fault, moment):
    world.provider.empty = {A}
    world.want("run")
    world.provider.script = [*["ok"] * moment, fault]
    world.pass_once()
    world.pass_once()
    assert [(pod.name, pod.zone) for pod in world.provider.live()] == [("run-a1", B)]
    assert "delete" not in " ".join(world.provider.calls)
    assert world.pass_once().ready == ["run"]


@pytest.mark.parametrize("state", [PodState.SUSPENDED, PodState.FAILED])
def test_a_lost_pod_is_deleted_and_replaced_elsewhere(world, state):
    world.want("run")
    world.pass_once()
    world.provider.put((A, "run-a1"), state, "PREEMPTED")
    world.pass_once()
    (pod,) = world.provider.pods.values()
    assert (pod.name, pod.zone) == ("run-a2", B)
    assert "run-a1" in [event.text for event in world.store.events("run")][-3]


def test_a_pod_that_disappeared_is_replaced(world):
    world.want("run")
    world.pass_once()
    world.provider.pods.clear()
    world.pass_once()
    assert [pod.name for pod in world.provider.live()] == ["run-a2"]


def test_maintenance_to_come_is_written_down_once(world):
    world.want("run")
    world.pass_once()
    world.provider.put((A, "run-a1"), PodState.READY, "maintenance from 10:00 to 11:00")
    world.pass_once()
    world.pass_once()
    assert world.events("run") == ["asked", "ready", "ready"]
    assert "maintenance from 10:00" in world.store.events("run")[-1].text


def test_a_queue_that_takes_too_long_is_left(world):
    world.provider.granted = PodState.WAITING
    world.want("run")
    world.pass_once()
    world.at += 99
    world.pass_once()
    assert [pod.zone for pod in world.provider.live()] == [A]
    world.at += 2
    world.pass_once()
    assert [(pod.name, pod.zone) for pod in world.provider.live()] == [("run-a2", B)]


def test_the_only_queue_is_not_left(world):
    world.provider.granted = PodState.WAITING
    world.want("run", replace(CONFIG, zones=(A,)))
    world.pass_once()
    world.at += 1000
    world.pass_once()
    assert [pod.name for pod in world.provider.live()] == ["run-a1"]


def test_released_pods_go_and_are_forgotten(world):
    world.provider.slow_delete = True
    world.want("run")
    world.pass_once()
    world.store.wanted.release("run")
    world.pass_once()
    assert world.store.wanted.find("run").pod.state is PodState.DELETING
    world.provider.settle()
    world.pass_once()
    assert world.store.wanted.find("run") is None
    (spent,) = world.store.spend.all()
    assert spent.released_at is not None


def test_strays_of_ours_are_deleted_and_others_are_not(world):
    world.want("run")
    config = replace(CONFIG, zones=(B,))
    world.has_asked("old-a3", B)
    world.provider.create("old-a3", config.with_labels(owner=world.store.owner))
    world.provider.create("other-a1", config.with_labels(owner="somebody else"))
    world.provider.create("nobodys", config)
    world.pass_once()
    assert {pod.name for pod in world.provider.live()} == {"run-a1", "other-a1", "nobodys"}


def test_a_late_creation_is_found_after_the_release(world):
    world.want("run")
    world.provider.script = ["ok", "refuse"]
    world.pass_once()
    world.store.wanted.release("run")
    world.pass_once()
    late = CONFIG.with_labels(owner=world.store.owner)
    world.provider.create("run-a1", replace(late, zones=(A,)))
    world.at += LATE_S - 1
    world.pass_once()
    assert world.provider.pods == {}
    world.at += 2
    world.pass_once()
    assert world.store.wanted.providers() == {}


def test_a_pod_is_not_doubled_while_the_one_before_cannot_be_deleted(world):
    world.want("run")
    world.pass_once()
    world.provider.put((A, "run-a1"), PodState.SUSPENDED)
    world.provider.script = ["ok", "refuse"]
    world.pass_once()
    assert [pod.name for pod in world.provider.pods.values()] == ["run-a1"]


def test_nor_while_a_late_one_cannot_be_deleted(world):
    labelled = CONFIG.with_labels(owner=world.store.owner, job="run")
    world.has_asked("run-a7", B)
    world.provider.create("run-a7", replace(labelled, zones=(B,)))
    world.want("run")
    world.provider.script = ["ok", "refuse"]
    world.pass_once()
    assert [pod.name for pod in world.provider.live()] == ["run-a7"]
    world.pass_once()
    assert [pod.name for pod in world.provider.live()] == ["run-a1"]


def test_one_reconciler_at_a_time(world):
    world.want("run")
    with holding(world.folder / LOCK):
        assert world.pass_once().was_busy
    assert world.provider.calls == []
    assert world.pass_once().created == ["run-a1"]


def test_a_pod_with_a_keeper_is_left_to_it_until_it_has_died(world):
    world.store.wanted.want("run", CONFIG, GCP, keeper="run")
    world.store.wanted.ask_in("run", zone=A, attempt=1)
    labelled = CONFIG.with_labels(owner=world.store.owner)
    world.provider.create("run-a1", replace(labelled, zones=(A,)))
    world.provider.put((A, "run-a1"), PodState.SUSPENDED)
    world.at += LATE_S + 1
    with holding(world.folder / KEEPERS / "run"):
        world.pass_once()
        assert world.store.wanted.find("run").pod.state is PodState.SUSPENDED
    world.pass_once()
    assert world.provider.pods == {}


def test_a_price_cap_leaves_dear_zones_out(world):
    dear = replace(CONFIG, tier=Tier.SPOT, max_price_per_hour=0.01)
    world.want("run", dear)
    error = world.pass_once().errors["run"]
    assert "at most $0.01 per hour is not available: the lowest price is $" in str(error)
    assert "days old" in str(error)
    assert "create" not in " ".join(world.provider.calls)


def test_without_a_zone_the_provider_chooses(world):
    world.want("run", PodConfig(tpu_type="v6e-8"))
    world.pass_once()
    assert [(pod.name, pod.zone) for pod in world.provider.live()] == [("run-a1", "")]
    assert world.pass_once().ready == ["run"]
    world.store.wanted.release("run")
    world.pass_once()
    assert world.provider.pods == {}


def test_higher_priority_gets_what_there_is(world):
    world.want("low")
    world.want("high", replace(CONFIG, priority=5))
    world.pass_once()
    assert world.provider.calls[1].startswith("create high-a1")


def test_spending_is_counted_with_its_price(world):
    world.want("run")
    world.pass_once()
    world.at += 3600
    (spent,) = world.store.spend.all("run")
    assert spent.price.unit == "USD/h"
    assert spent.cost.value == pytest.approx(8 * 2.7)
    assert (spent.cost.origin, spent.cost.date != "") == ("third-party", True)


FAULTS = st.sampled_from(["ok"] * 4 + ["lose", "late", "refuse", "die", "die after"])
RUNS = ("x", "y")
DEEDS = st.one_of(
    st.tuples(st.just("want"), st.sampled_from(RUNS)),
    st.tuples(st.just("release"), st.sampled_from(RUNS)),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("stock"), st.sets(st.sampled_from(ZONES))),
    st.tuples(st.just("wait"), st.integers(1, 200)),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("pass"), st.lists(FAULTS, max_size=12)),
    st.tuples(st.just("pass"), st.lists(FAULTS, max_size=12)),
)


def do(world, deed, value):
    if deed == "want":
        with contextlib.suppress(ConfigError):  # it is being deleted
            world.want(value)
    elif deed == "release":
        world.store.wanted.release(value)
    elif deed == "lose":
        live = sorted(key for key, pod in world.provider.pods.items() if pod.is_ready)
        if live:
            state = [PodState.SUSPENDED, PodState.FAILED, None][value % 3]
            key = live[value % len(live)]
            world.provider.put(key, state) if state else world.provider.pods.pop(key)
    elif deed == "stock":
        world.provider.empty = value
    elif deed == "wait":
        world.at += value
    elif deed == "settle":
        world.provider.settle()
    else:
        world.provider.script = [*value]
        world.pass_once()
        world.provider.script = []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(DEEDS, min_size=5, max_size=25),
    st.sampled_from([PodState.READY, PodState.WAITING]),
    st.booleans(),
)
@example(  # one that is made after its release
    [("pass", ["ok", "ok", "late"]), ("release", "y"), ("pass", [])], PodState.READY, False
)
def test_nothing_is_leaked_or_doubled(deeds, granted, slow_delete):
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        world = World(Path(folder), ScriptedProvider(granted=granted, slow_delete=slow_delete))
        were_late = False
        for run in RUNS:
            world.want(run)
        for deed, value in deeds:
            do(world, deed, value)
            were_late |= bool(world.provider.under_way)
            for run in RUNS:  # what a provider makes after it said no, only the next pass can find
                assert were_late or len(world.provider.live(run)) <= 1, world.provider.calls
        world.provider.empty = set()
        for _ in range(4):
            world.provider.settle()
            world.pass_once()
        report = world.pass_once()
        wanted = {row.name for row in world.store.wanted.all()}
        assert not report.errors
        assert {pod.labels["job"] for pod in world.provider.live()} == wanted
        assert len(world.provider.pods) == len(wanted), "leaked"
        assert all(row.pod.is_ready and not row.is_released for row in world.store.wanted.all())
        counted = [one.pod for one in world.store.spend.all() if one.released_at is None]
        assert sorted(counted) == sorted(pod.name for pod in world.provider.pods.values())
        world.store.close()
