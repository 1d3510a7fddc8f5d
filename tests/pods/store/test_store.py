"""What a store keeps, and who may write it at the same time."""

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError, TPUBackendError
from tpukit.hardware.figure import Figure
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Cause, Ending, Pod, PodConfig, PodLife, PodState, Tier
from tpukit.pods.pod import Host
from tpukit.pods.store import ProviderRecord, Store
from tpukit.pods.store.records import pod_name, split_pod_name
from tpukit.pods.store.store import HALF_LIFE_S
from tpukit.pods.supervision.journal import Attempt, Journal

CONFIG = PodConfig(tpu_type="v6e-8", zones=("a", "b", "c"))
LOCAL = ProviderRecord.of("local", LaunchSettings())
PRICE = Figure(2.0, "USD/h", "third-party", "a catalogue", "2026-08-21")


class Clock:
    def __init__(self):
        self.at = 1_000_000.0

    def __call__(self):
        return self.at


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    made = Store(tmp_path, now=clock)
    yield made
    made.close()


def pod(name="run-a1", state=PodState.READY):
    return Pod(
        name=name,
        provider="local",
        slice=CONFIG.slice,
        zone="a",
        state=state,
        hosts=(Host("h0", "10.0.0.1"),),
        labels={"owner": "me"},
    )


def test_what_is_wanted_outlives_the_process(store, tmp_path, clock):
    store.wanted.want("run", CONFIG, LOCAL)
    store.wanted.ask_in("run", zone="b", attempt=2)
    store.wanted.observe("run", pod())
    store.close()
    again = Store(tmp_path, now=clock)
    (found,) = again.wanted.all()
    assert (found.config, found.zone, found.pod_name) == (CONFIG, "b", "run-a2")
    assert found.pod == pod()
    assert again.owner == store.owner
    assert again.wanted.providers() == {LOCAL.id: LOCAL}
    again.close()


def test_wanting_the_same_again_changes_nothing_and_another_is_refused(store):
    first = store.wanted.want("run", CONFIG, LOCAL)
    assert store.wanted.want("run", CONFIG, LOCAL) == first
    with pytest.raises(ConfigError, match="already wanted, as v6e-8"):
        store.wanted.want("run", PodConfig(tpu_type="v6e-16"), LOCAL)
    store.wanted.release("run")
    with pytest.raises(ConfigError, match="being deleted"):
        store.wanted.want("run", CONFIG, LOCAL)
    store.wanted.forget("run")
    assert store.wanted.want("run", CONFIG, LOCAL).attempt == 1


def test_a_name_leaves_room_for_the_number(store):
    with pytest.raises(ConfigError, match="at most 34 letters"):
        store.wanted.want("x" * 38, CONFIG, LOCAL)


def test_higher_priority_goes_first(store, clock):
    for name, priority in (("low", 0), ("high", 5), ("late", 5)):
        clock.at += 1
        store.wanted.want(name, PodConfig(tpu_type="v6e-8", priority=priority), LOCAL)
    assert [one.name for one in store.wanted.all()] == ["high", "late", "low"]


def test_a_provider_is_kept_without_the_jobs_secrets(store, tmp_path):
    launch = LaunchSettings(project="p", zone="z", environment={"TOKEN": "hunter2"})
    record = ProviderRecord.of("gcp", launch)
    store.wanted.want("run", CONFIG, record)
    assert store.wanted.providers()[record.id].launch.project == "p"
    store.close()
    assert not [file for file in tmp_path.iterdir() if b"hunter2" in file.read_bytes()]


def test_zones_that_refuse_go_last_and_come_back(store, clock):
    def order():
        return store.history.order("p", CONFIG, CONFIG.zones)

    def refuse(zone, cause=Cause.STOCKOUT):
        store.history.asked("p", CONFIG, zone=zone, pod="run-a1")
        store.history.ended("p", zone=zone, pod="run-a1", cause=cause)

    assert order() == ["a", "b", "c"]
    refuse("a")
    assert order() == ["b", "c", "a"]
    refuse("b")
    refuse("b", Cause.SPOT)
    refuse("c")
    refuse("a", Cause.STOPPED)
    assert order() == ["a", "c", "b"]
    assert store.history.order("p", PodConfig(tpu_type="v6e-16"), "abc") == ["a", "b", "c"]
    clock.at += HALF_LIFE_S
    assert order() == ["a", "c", "b"], "what failed twice counts longer"
    clock.at += HALF_LIFE_S
    assert order() == ["a", "b", "c"]


def test_money_is_counted_from_ready_to_released(store, clock):
    store.spend.begin("run", "p", pod(), PRICE)
    clock.at += 1800
    store.spend.begin("run", "p", pod(), PRICE)  # seen ready again
    (running,) = store.spend.all()
    assert (running.hours, running.cost.value, running.released_at) == (0.5, 1.0, None)
    store.spend.end("p", zone="a", pod="run-a1")
    clock.at += 1800
    store.spend.end("p", zone="a", pod="run-a1")
    (over,) = store.spend.all("run")
    assert over.cost == Figure(1.0, "USD", "third-party", "a catalogue", "2026-08-21")
    assert store.spend.all("other") == []


def test_it_is_a_journal(store):
    journal: Journal = store
    attempt = Attempt(number=2, pod="run-a1", zone="a", slice="v6e-8", asked_at=1.0)
    over = Attempt(
        number=1,
        pod="run-a1",
        zone="a",
        slice="v6e-8",
        asked_at=0.0,
        ended_at=3.0,
        ending=Ending(Cause.SPOT, host="h0", evidence="PREEMPTED"),
    )
    journal.record("run", attempt)
    journal.record("run", over)
    journal.record("run", over)
    assert journal.attempts("run") == [over, attempt]
    assert journal.attempts("other") == []


def test_events_are_kept_in_order(store):
    for number in range(3):
        store.note("run", "asked", f"{number}")
    store.note("other", "asked", "x")
    assert [event.text for event in store.events("run", after=1)] == ["1", "2"]
    assert len(store.events()) == 4


def test_a_block_that_fails_writes_nothing(store):
    def fail():
        with store._database.writing():
            store.note("run", "asked", "x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.events() == []


def test_many_threads_and_processes_write_at_once(store, tmp_path):
    program = (
        "import sys; from pathlib import Path; from tpukit.pods.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for n in range(50): store.note('run', 'process', str(n))"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]

    def write():
        for number in range(50):
            store.note("run", "thread", str(number))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait() for child in children] == [0, 0]
    assert len(store.events("run")) == 300


def test_two_that_open_a_new_store_have_one_owner(tmp_path):
    owners = set()

    def open_one():
        one = Store(tmp_path)
        owners.add(one.owner)
        one.close()

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(owners) == 1


def test_what_is_no_store_is_named(tmp_path):
    (tmp_path / "pods.sqlite").write_bytes(b"this is no database, though it is long enough" * 9)
    with pytest.raises(TPUBackendError, match=r"pods\.sqlite cannot be opened .*TPUKIT_STATE_DIR"):
        Store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TPUBackendError, match="cannot be opened"):
        Store(tmp_path / "file")


def test_a_newer_store_is_left_alone(store, tmp_path):
    store.close()
    connection = sqlite3.connect(tmp_path / "pods.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(TPUBackendError, match="newer tpukit"):
        Store(tmp_path)


def test_where_it_lies(monkeypatch, tmp_path):
    from tpukit.runtime.files import state_folder

    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path))
    assert state_folder() == tmp_path
    monkeypatch.delenv("TPUKIT_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/tpukit")


@given(st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True), st.integers(1, 9999))
def test_names_of_pods_are_read_back(name, attempt):
    assert split_pod_name(pod_name(name, attempt)) == (name, attempt)


def test_lives_are_remembered_for_whoever_ranks_zones(tmp_path):
    clock = [1000.0]
    store = Store(tmp_path, now=lambda: clock[0])
    config = PodConfig(tpu_type="v6e-16", tier=Tier.SPOT)
    store.history.asked("gcp-1", config, zone="us-east5-b", pod="run-a1")
    clock[0] = 1060.0
    store.history.ready("gcp-1", zone="us-east5-b", pod="run-a1")
    clock[0] = 4000.0
    store.history.ended("gcp-1", zone="us-east5-b", pod="run-a1", cause=Cause.SPOT)
    assert store.history.lives(since=3000.0) == [
        PodLife(
            slice="v6e-16",
            zone="us-east5-b",
            tier=Tier.SPOT,
            asked_at=1000.0,
            ready_at=1060.0,
            ended_at=4000.0,
            cause=Cause.SPOT,
        )
    ]
    assert store.history.lives(since=5000.0) == []
    store.close()
