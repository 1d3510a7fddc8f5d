"""No pass of any store deletes a pod that a run, of any record of any store, still has."""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_provider import IN_MEMORY, ScriptedProvider

from tpukit.errors import ConfigError, ProviderError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Capabilities, PodConfig, PodState
from tpukit.pods.launching.launch import RecordedProvider
from tpukit.pods.listing import PodListing
from tpukit.pods.observing import Observer
from tpukit.pods.reconciler import KEEPERS, LATE_S, Reconciler
from tpukit.pods.store import ProviderRecord, Store
from tpukit.pods.store.locks import holding

ZONES = ("us-central1-a", "us-east5-b")
CONFIG = PodConfig(tpu_type="v6e-8", zones=ZONES)
RECORDS = [
    ProviderRecord.of("gcp", LaunchSettings(project="p", **more))
    for more in ({}, {"zone": ZONES[1]}, {"ssh_user": "me"}, {"zones": ZONES, "ssh_user": "me"})
]
RUNS = ("x", "y")


class SharedProject(ScriptedProvider):
    """One project that several stores ask; notes every deletion of a pod in use."""

    def __post_init__(self):
        super().__post_init__()
        self.users, self.wrongs, self.meanwhile = [], [], None

    def list(self, *, owner=None):
        found = super().list(owner=owner)
        deed, self.meanwhile = self.meanwhile, None
        if deed is not None:  # another process acts while this reply is on its way
            deed()
        return found

    def delete(self, name, *, zone):
        pod = self.pods.get((zone, name))
        if pod is not None and not pod.state.is_lost:
            self.wrongs += [name for user in self.users if user.uses(pod)]
        return super().delete(name, zone=zone)


class User:
    """A store with its reconciler and the supervisors of launched runs."""

    def __init__(self, folder, project, clock):
        self.project, self.clock = project, clock
        self.store = Store(folder, now=lambda: clock[0])
        self.reconciler = Reconciler(self.store, opener=lambda record: project, width=1)
        self.keepers = {}
        project.users.append(self)

    def uses(self, pod):
        """Whether a run of this store has the pod, and nobody has given it back."""
        if pod.labels.get("owner") != self.store.owner:
            return False
        for row in self.store.wanted.all():
            if (row.pod_name, row.zone) != (pod.name, pod.zone) or row.is_released:
                continue
            died = row.keeper is not None and row.name not in self.keepers
            if not (died and self.clock[0] - row.kept_at > LATE_S):
                return True
        return False

    def up(self, run, record):
        with contextlib.suppress(ConfigError):  # the name is in use, or being deleted
            self.store.wanted.want(run, CONFIG, RECORDS[record])

    def launch(self, run, record, zone):
        """Supervise a run: want its pod, and ask for the pod of the next attempt."""
        if run not in self.keepers:
            with contextlib.suppress(ConfigError):
                row = self.store.wanted.want(run, CONFIG, RECORDS[record], keeper=run)
                if row.keeper is not None and row.provider == RECORDS[record].id:
                    lock = holding(self.store.folder / KEEPERS / run)
                    assert lock.__enter__()
                    observer = Observer(self.store, RECORDS[record].id, "gcp")
                    self.keepers[run] = (lock, RecordedProvider(self.project, observer, run))
        row = self.store.wanted.find(run)
        if run not in self.keepers or row is None or row.is_released:
            return
        provider = self.keepers[run][1]
        if row.zone is not None and (there := provider.get(row.pod_name, zone=row.zone)):
            if not there.state.is_lost:
                return
            provider.delete(row.pod_name, zone=row.zone)
        attempt = row.attempt + (row.zone is not None)
        asked = replace(CONFIG.with_labels(job=run), zones=(zone,))
        with contextlib.suppress(ConfigError, ProviderError):  # another store has the name there
            provider.create(f"{run}-a{attempt}", asked)

    def die(self, run):
        if run in self.keepers:
            self.keepers.pop(run)[0].__exit__(None, None, None)

    def close(self):
        for run in [*self.keepers]:
            self.die(run)
        self.store.close()


@contextlib.contextmanager
def users(count=2, **project):
    """Users of one project, each with a store of its own."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder, contextlib.ExitStack() as closing:
        shared, clock = SharedProject(**project), [1e9]
        found = [User(Path(folder) / str(number), shared, clock) for number in range(count)]
        for user in found:
            closing.callback(user.close)
        yield shared, clock, found


@pytest.mark.parametrize("second", range(1, len(RECORDS)))
def test_a_second_launch_leaves_the_first_runs_pod_alone(second):
    with users(1) as (project, _, (user,)):
        user.launch("x", 0, ZONES[0])
        user.launch("y", second, ZONES[1])
        report = user.reconciler.run_pass()
        assert (report.deleted, report.errors, report.unknown) == ([], {}, [])
        assert {pod.name for pod in project.live()} == {"x-a1", "y-a1"}


def test_a_pod_that_is_asked_for_during_the_list_is_no_stray():
    with users(1) as (project, _, (user,)):
        user.up("y", 0)
        user.reconciler.run_pass()
        project.meanwhile = lambda: user.launch("x", 0, ZONES[0])
        user.reconciler.run_pass()
        user.reconciler.run_pass()
        assert {pod.name for pod in project.live()} == {"x-a1", "y-a1"}
        assert not [one for one in user.store.spend.all() if one.released_at is not None]


def test_a_name_that_another_store_has_is_refused_and_its_pod_stays():
    with users(2) as (project, _, (one, two)):
        one.up("x", 0)
        one.reconciler.run_pass()
        two.up("x", 0)
        report = two.reconciler.run_pass()
        said = str(report.errors["x"])
        assert "belongs to tpukit-" in said
        assert "--name" in said
        two.store.wanted.release("x")
        two.reconciler.run_pass()
        assert two.store.wanted.find("x") is None
        assert [pod.name for pod in project.live()] == ["x-a1"]


def test_a_pod_with_our_label_that_the_store_does_not_know_is_reported_and_stays():
    with users(1) as (project, _, (user,)):
        user.up("x", 0)
        labelled = replace(CONFIG, zones=ZONES[:1]).with_labels(owner=user.store.owner)
        project.create("copy-a1", labelled)
        listing = PodListing.look(user.store, user.reconciler)
        assert [row.wanted.pod_name for row in listing.rows] == ["x-a1"]
        assert any("copy-a1 in us-central1-a has this store's label" in p for p in listing.problems)
        assert len(project.live()) == 2


def test_a_job_that_its_provider_keeps_running_outlives_its_supervisor():
    with users(1, capabilities=Capabilities(runs_gangs=True)) as (project, clock, (user,)):
        user.launch("x", 0, ZONES[0])
        user.die("x")
        clock[0] += 10 * LATE_S
        user.reconciler.run_pass()
        assert [pod.name for pod in project.live()] == ["x-a1"]


WHO = st.integers(0, 2)
RUN = st.sampled_from(RUNS)
RECORD = st.integers(0, len(RECORDS) - 1)
LAUNCH = st.tuples(st.just("launch"), WHO, RUN, RECORD, st.sampled_from(ZONES))
PASS = st.tuples(st.just("pass"), WHO, st.one_of(st.none(), LAUNCH))
DEEDS = st.one_of(
    LAUNCH,
    PASS,
    PASS,
    st.tuples(st.just("up"), WHO, RUN, RECORD),
    st.tuples(st.just("release"), WHO, RUN),
    st.tuples(st.just("die"), WHO, RUN),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([1, LATE_S + 1])),
)


def do(project, clock, people, deed, *values):
    if deed == "wait":
        clock[0] += values[0]
        for user in people:
            for run in user.keepers:
                user.store.wanted.keep(run)
    elif deed == "lose":
        if live := sorted(key for key, pod in project.pods.items() if pod.is_ready):
            project.put(live[values[0] % len(live)], PodState.SUSPENDED)
    else:
        who, *rest = values
        user = people[who]
        if deed == "pass":
            if rest[0] is not None:
                project.meanwhile = lambda: do(project, clock, people, *rest[0])
            user.reconciler.run_pass()
        elif deed == "release":
            user.store.wanted.release(*rest)
        else:
            getattr(user, deed)(*rest)


@settings(max_examples=100, deadline=None)
@given(st.lists(DEEDS, min_size=4, max_size=25))
@example([("launch", 0, "x", 0, ZONES[0]), ("launch", 0, "y", 1, ZONES[1]), ("pass", 0, None)])
@example([("up", 0, "x", 0), ("pass", 0, None), ("up", 1, "x", 0), ("release", 1, "x")])
def test_nothing_deletes_a_pod_that_some_run_has(deeds):
    with users(3) as (project, clock, people):
        for deed in deeds:
            do(project, clock, people, *deed)
            assert project.wrongs == [], project.calls
        for user in people:
            user.reconciler.run_pass()
        assert project.wrongs == []
        for user in people:  # and nothing is left when all is given back
            for run in RUNS:
                user.die(run)
                user.store.wanted.release(run)
        for _ in range(3):
            for user in people:
                user.reconciler.run_pass()
        assert project.pods == {}
