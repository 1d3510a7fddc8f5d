"""`launch.limits`: kept before anybody is asked, whatever happens and whoever else asks."""

import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_provider import Killed, ScriptedProvider
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import ConfigError, PodUnavailable
from tpukit.job.sections import ChipLimit, LaunchSettings
from tpukit.pods import Capabilities, Cause, PodConfig, PodState, Store, Tier, TpuManager
from tpukit.pods.launching.launch import RecordedProvider
from tpukit.pods.observing import Observer
from tpukit.pods.providers.gcp.provider import CloudTPUProvider
from tpukit.pods.reconciler import Reconciler
from tpukit.pods.store import ProviderRecord
from tpukit.pods.store.store import WantedPods
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.zone_search import NoPod, ZoneSearch
from tpukit_emulators.holding import Pace, Zone
from tpukit_emulators.tpu_api.server import TPUAPI
from tpukit_emulators.world import World

A, B, C = "us-central2-b", "europe-west4-a", "us-east5-b"
TABLE = (
    ChipLimit(zone=A, type="v4", chips=32),
    ChipLimit(zone=A, type="v4", chips=64, tier="spot"),
    ChipLimit(zone=B, type="v6e", chips=16, tier="spot"),
    ChipLimit(zone=C, type="v6e", chips=8, tier="spot"),
)
V4 = PodConfig(tpu_type="v4-32", zones=(A,))  # 16 chips
V6E = PodConfig(tpu_type="v6e-8", tier=Tier.SPOT)
LAUNCH = LaunchSettings(project="p", limits=TABLE)


@pytest.fixture
def provider(monkeypatch):
    made = ScriptedProvider(capabilities=Capabilities().within(LAUNCH))
    monkeypatch.setattr("tpukit.pods.manager.open_provider", lambda name, launch: made)
    return made


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def manager(provider, store):
    return TpuManager(provider="gcp", launch=LAUNCH, state=store)


class TestTable:
    def test_rows_take_the_words_that_people_have(self):
        row = ChipLimit(zone=B, type="v5litepod", chips=64, tier="preemptible")
        assert (row.type, row.tier) == ("v5e", "spot")
        assert ChipLimit(zone=A, type="v4", chips=32, tier="on_demand").tier == "on-demand"

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"zone": "us-central2-bb"}, "Did you mean 'us-central2-b'"),
            ({"type": "v44"}, "Did you mean 'v4'"),
            ({"tier": "spott"}, "'spot'"),
            ({"chips": -1}, "accepted are 0 to"),
            ({"chip": 8}, "Did you mean 'chips'"),
        ],
    )
    def test_what_is_wrong_is_said_with_what_is_near(self, row, said):
        with pytest.raises(ValueError, match=said):
            LaunchSettings(limits=({"zone": A, "type": "v4", "chips": 32} | row,))

    def test_a_zone_that_is_asked_counts_as_known(self):
        row = ChipLimit(zone="moon-north1-a", type="v6e", chips=8)
        assert LaunchSettings(zones=("moon-north1-a",), limits=(row,)).limits == (row,)
        with pytest.raises(ValueError, match=r"unknown and not in launch\.zones"):
            LaunchSettings(limits=(row,))

    def test_a_second_row_for_the_same_is_refused(self):
        with pytest.raises(ValueError, match=r"two rows for v4 \(on-demand\) in us-central2-b"):
            LaunchSettings(limits=(TABLE[0], TABLE[0]))

    def test_they_are_what_the_provider_offers(self, manager):
        assert manager.opened.capabilities.limits == TABLE
        assert manager.opened.capabilities.zones == (A, B, C)
        assert manager.record.launch.limits == TABLE, "also for whoever reconciles later"


class TestRequests:
    def test_what_is_held_counts(self, manager, provider):
        for name in ("one", "two"):
            manager.allocate_pod(V4, name=name)
        before = list(provider.calls)
        with pytest.raises(PodUnavailable) as refused:
            manager.allocate_pod(V4, name="three")
        assert str(refused.value) == (
            "launch.limits grants 32 v4 chips (on-demand) in us-central2-b: 32 are in use "
            "(one-a1, two-a1), and v4-32 needs 16. Release pods (tpukit pods ls), add zones, use a "
            "smaller slice, or correct launch.limits if you were granted more."
        )
        assert refused.value.cause == Cause.QUOTA
        assert provider.calls == before, "nobody was asked"
        manager.release("one")
        manager.allocate_pod(V4, name="three")

    def test_tiers_and_types_count_apart(self, manager):
        for name in ("one", "two"):
            manager.allocate_pod(V4, name=name)
        spot = V4.with_preemptible()
        assert [manager.allocate_pod(spot, name=f"s{n}").tier for n in range(4)] == [Tier.SPOT] * 4
        with pytest.raises(PodUnavailable, match=r"64 v4 chips \(spot\)"):
            manager.allocate_pod(spot)

    def test_asking_again_for_the_same_pod_is_no_second_one(self, manager):
        full = replace(V4, tpu_type="v4-64")
        assert manager.allocate_pod(full, name="all") == manager.allocate_pod(full, name="all")

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            (replace(V4, tpu_type="v4-128"), "grants 32 v4 chips .* but v4-128 needs 64"),
            (replace(V4, zones=("us-central2-c",)), "in us-central2-c. Did you mean '" + A),
            (replace(V4, tpu_type="v3-8"), "grants no v3 chips"),
            (V4.with_preemptible(False).in_zone(C), "no v4 chips"),
        ],
    )
    def test_what_can_never_be_is_said_at_once(self, manager, provider, config, said):
        with pytest.raises(PodUnavailable, match=said) as refused:
            manager.allocate_pod(config, wait_s=60)
        assert refused.value.cause == Cause.UNPLACEABLE
        assert provider.calls == []

    def test_a_full_zone_is_passed_over_with_the_reason(self, manager, store):
        told = []
        assert manager.allocate_pod(V6E, name="one", progress=told.append).zone == B
        assert manager.allocate_pod(V6E, name="two").zone == B
        assert manager.allocate_pod(V6E, name="three", progress=told.append).zone == C
        assert any(line.startswith(f"{B} is skipped: launch.limits grants 16") for line in told)
        assert "passed_over" in [event.kind for event in store.events("three")]
        with pytest.raises(PodUnavailable) as refused:
            manager.allocate_pod(V6E)
        for said in (f"in {B}: 16 are in use", f"in {C}: 8 are in use", "Release pods"):
            assert said in str(refused.value)

    def test_without_a_zone_those_of_the_table_are_asked(self, manager):
        assert manager.allocate_pod(PodConfig(tpu_type="v4-8")).zone == A

    def test_who_waits_gets_what_becomes_free(self, manager):
        manager.allocate_pod(replace(V4, tpu_type="v4-64"), name="first")
        threading.Timer(0.3, lambda: manager.release("first")).start()
        assert manager.allocate_pod(V4, name="second", wait_s=30).zone == A

    def test_pods_of_others_in_the_project_count(self, manager, provider):
        provider.create("theirs", replace(V4, tpu_type="v4-64", labels={"owner": "them"}))
        with pytest.raises(PodUnavailable, match=r"32 are in use \(theirs\)"):
            manager.allocate_pod(V4)

    def test_so_do_those_that_are_lost_or_being_deleted(self, manager, provider):
        pod = manager.allocate_pod(replace(V4, tpu_type="v4-64"), name="lost")
        provider.slow_delete = True
        provider.put((A, pod.name), PodState.SUSPENDED)
        report = manager.reconciler.run_pass()
        assert isinstance(report.errors["lost"], PodUnavailable)
        assert [one.name for one in provider.pods.values()] == ["lost-a1"]
        provider.settle()
        manager.reconciler.run_pass()
        assert [one.name for one in provider.live()] == ["lost-a2"]

    def test_the_same_project_under_another_name_counts(self, manager, store, provider):
        same = ProviderRecord.of("gcp", LaunchSettings(zone=A))  # a project nobody names
        other = ProviderRecord.of("gcp", LaunchSettings(project="q"))
        for name, record in (("mine", same), ("theirs", other)):
            store.wanted.want(name, V4, record)
            store.wanted.ask_in(name, zone=A, attempt=1)
        assert [hold.pod for hold in store.wanted.holds(manager.record)] == ["mine-a1"]

    def test_a_queue_is_not_left_for_a_zone_that_is_full(self, provider, store):
        at = [1e9]
        store = Store(store.folder / "own", now=lambda: at[0])
        manager = TpuManager(provider="gcp", launch=LAUNCH, state=store)
        manager.allocate_pod(V6E.in_zone(C), name="full")
        provider.granted = PodState.WAITING
        waiting = replace(V6E, zones=(B, C), queue_timeout_s=10)
        store.wanted.want("queued", waiting, manager.record)
        for _ in range(3):
            manager.reconciler.run_pass()
            at[0] += 100
        assert [pod.name for pod in provider.live("queued")] == ["queued-a1"]
        store.close()


class TestPreflight:
    def test_it_says_what_is_left(self, manager):
        manager.allocate_pod(V4, name="one")
        (found,) = manager.preflight(V4)
        assert (found.id, found.severity) == ("limits", "ok")
        assert "16 of the 32 v4 chips (on-demand) granted in us-central2-b are in use" in found.seen

    def test_a_full_zone_is_a_warning_and_all_full_an_error(self, manager):
        manager.allocate_pod(V6E.in_zone(C), name="one")
        assert [one.severity for one in manager.preflight(V6E)] == ["ok", "warning"]
        big = replace(V6E, tpu_type="v6e-32")
        found = manager.preflight(big)
        assert [one.severity for one in found] == ["error", "error"]
        assert "add zones" in found[0].fix

    def test_the_command_shows_it(self, manager, store, monkeypatch, tmp_path):
        monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
        job = tmp_path / "job.yaml"
        job.write_text(
            "model: tiny\non: v4-128\nlaunch:\n  provider: gcp\n  project: p\n"
            f"  limits:\n  - {{zone: {A}, type: v4, chips: 32}}\n"
        )
        shown = CliRunner().invoke(app, ["pods", "preflight", str(job)])
        assert shown.exit_code == 1
        assert "but v4-128 needs 64" in " ".join(shown.output.split())


def supervised(store, provider, record, run, config):
    """A provider as the supervisor of a run has it."""
    store.wanted.want(run, config, record, keeper=run)
    limits = provider.capabilities.limits
    observer = Observer(store, record.id, provider.name, None, limits)
    return RecordedProvider(provider, observer, run)


def test_a_supervisor_is_told_of_each_zone(provider, store):
    record = ProviderRecord.of("gcp", LAUNCH)
    for name, zone in (("x", B), ("y", B), ("z", C)):
        supervised(store, provider, record, name, V6E).create(f"{name}-a1", V6E.in_zone(zone))
    told = []
    mine = supervised(store, provider, record, "run", V6E)
    search = ZoneSearch(mine, Policy(patience_s=0.5), tell=told.append, stopping=threading.Event())
    with pytest.raises(NoPod, match=f"in {B}: 16 are in use .* in {C}: 8 are in use"):
        search.get("run-a1", V6E, command=None, asking=lambda zone: None)
    refused = {event.zone for event in told if hasattr(event, "cause")}
    assert refused == {B, C}
    assert not provider.live("run")


def test_the_last_chips_are_given_once(provider, tmp_path, monkeypatch):
    """Whoever asks has the store to itself from the count until its own request is written down."""
    count = WantedPods.holds

    def slowly(*arguments, **named):
        held = count(*arguments, **named)
        time.sleep(0.02)
        return held

    monkeypatch.setattr(WantedPods, "holds", slowly)
    record, given = ProviderRecord.of("gcp", LAUNCH), []

    def ask(number):
        store = Store(tmp_path)  # as in a process of its own
        mine = supervised(store, provider, record, f"run{number}", V6E)
        with contextlib.suppress(PodUnavailable):
            given.append(mine.create(f"run{number}-a1", V6E.in_zone(B)))
        store.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 2


# --- never more than the limit, whatever happens ---------------------------------------------

ZONES = (A, B)
LIMITS = {A: 16, B: 8}
ROWS = tuple(ChipLimit(zone=zone, type="v6e", chips=chips) for zone, chips in LIMITS.items())
SIZES = ("v6e-1", "v6e-4", "v6e-8", "v6e-16")
RUNS = ("u", "v", "w", "x", "y")


class Counting(ScriptedProvider):
    """Looks at what is held each time it makes something."""

    def create(self, name, config, *, command=None):
        pod = super().create(name, config, command=command)
        self.check()
        return pod

    def check(self):
        held = Counter()
        for pod in self.pods.values():
            held[pod.zone] += pod.slice.chips
        assert all(held[zone] <= LIMITS[zone] for zone in held), (held, self.calls)


FAULTS = st.sampled_from(["ok"] * 4 + ["lose", "refuse", "die", "die after"])
DEEDS = st.one_of(
    st.tuples(st.just("want"), st.tuples(st.sampled_from(RUNS), st.sampled_from(SIZES))),
    st.tuples(st.just("release"), st.sampled_from(RUNS)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("stock"), st.sets(st.sampled_from(ZONES))),
    st.tuples(st.just("pass"), st.lists(FAULTS, max_size=12)),
    st.tuples(st.just("pass"), st.lists(FAULTS, max_size=12)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(DEEDS, min_size=8, max_size=40),
    st.sampled_from([PodState.READY, PodState.WAITING]),
    st.booleans(),
)
def test_no_schedule_holds_more_than_the_limit(deeds, granted, slow_delete):
    launch = LaunchSettings(project="p", limits=ROWS)
    record = ProviderRecord.of("gcp", launch)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        provider = Counting(
            capabilities=Capabilities().within(launch), granted=granted, slow_delete=slow_delete
        )
        for deed, value in [*deeds, ("stock", set()), *[("settle", None), ("pass", [])] * 4]:
            if deed == "want":
                run, size = value
                with contextlib.suppress(ConfigError):  # it is wanted otherwise
                    store.wanted.want(run, PodConfig(tpu_type=size, zones=ZONES), record)
            elif deed == "release":
                store.wanted.release(value)
            elif deed == "lose" and (there := sorted(provider.pods)):
                provider.put(there[value % len(there)], PodState.SUSPENDED)
            elif deed == "settle":
                provider.settle()
            elif deed == "stock":
                provider.empty = value
            elif deed == "pass":
                provider.script = [*value]
                with contextlib.suppress(Killed):
                    Reconciler(store, opener=lambda _: provider, width=1).run_pass()
                provider.script = []
        refused = Reconciler(store, opener=lambda _: provider).run_pass().errors
        for row in store.wanted.all():  # who has none would not fit anywhere
            has = any(pod.labels["job"] == row.name for pod in provider.live())
            assert has == (row.name not in refused)
            if not has:
                assert "launch.limits grants" in str(refused[row.name])
        store.close()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_nor_do_many_who_ask_the_emulated_cloud_at_once(authority, seed):
    """Reconcilers and supervisors side by side; quota counts until a resource is gone."""
    luck = random.Random(seed)
    world = World(
        {zone: Zone({"v6e": 1000}) for zone in ZONES},
        pace=Pace(decide_s=0.001, start_s=0.002, release_s=0.02),
    )
    most = Counter()

    def watch(_):
        held = Counter()
        for one in world.holdings():
            held[one.zone] += one.amount
        for zone in held:
            most[zone] = max(most[zone], held[zone])

    world.watch(watch)
    with tempfile.TemporaryDirectory() as folder:
        api = TPUAPI(Path(folder) / "api", world=world, authority=authority)
        launch = LaunchSettings(
            project=api.project,
            endpoint=api.endpoint,
            credentials_file=str(api.owner.key_file),
            limits=ROWS,
        )
        provider, store = CloudTPUProvider(launch), Store(Path(folder) / "state")
        record = ProviderRecord.of("gcp", launch)

        def keep(run, luck):
            """As a supervisor does: ask, lose, ask again."""
            for attempt in range(1, 4):
                config = PodConfig(tpu_type=luck.choice(SIZES), zones=(luck.choice(ZONES),))
                mine = supervised(store, provider, record, f"{run}-{attempt}", config)
                with contextlib.suppress(PodUnavailable):
                    pod = mine.create(f"{run}-{attempt}-a1", config)
                    mine.delete(pod.name, zone=pod.zone)
                    pod = mine.create(f"{run}-{attempt}-a2", config)
                    mine.delete(pod.name, zone=pod.zone)

        def reconcile(luck):
            reconciler = Reconciler(store, opener=lambda _: provider, width=4)
            for number in range(6):
                config = PodConfig(tpu_type=luck.choice(SIZES), zones=ZONES)
                store.wanted.want(f"pod-{number}", config, record)
                if number % 2:
                    store.wanted.release(f"pod-{luck.randrange(number)}")
                reconciler.run_pass()

        threads = [
            threading.Thread(target=keep, args=(f"job{n}", random.Random(luck.random())))
            for n in range(3)
        ]
        threads.append(threading.Thread(target=reconcile, args=(random.Random(luck.random()),)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.close()
        api.close()
    assert most, "somebody was given something"
    assert all(most[zone] <= LIMITS[zone] for zone in most), most
