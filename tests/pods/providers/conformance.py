"""What every provider must do, whoever it is: one suite, run against each.

A provider's test file has a class that inherits from `ProviderConformance` and a fixture `case`:

```python
class TestMyProvider(ProviderConformance):
    @pytest.fixture
    def case(self, …):
        return Case(provider=…, config=…, …)
```

What a case leaves out (`None`) its provider cannot do; the suite then asks that
`capabilities.refused` says why.
"""

import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import psutil
import pytest

from tpukit.errors import TPUError
from tpukit.pods.causes import Cause, Kind
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import Pod, PodState, Tier
from tpukit.pods.providers.protocol import Command, Ended, Line, Provider

PATIENCE_S = 30.0
POLL_S = 0.02


@dataclass(kw_only=True)
class Case:
    """A provider, and hands on the cloud behind it.

    Attributes:
        config: A small pod with one zone.
        lose_reply: Lets the next request for a pod be carried out and its reply get lost.
        preempt: Takes a pod away, its processes having so many seconds from SIGTERM.
        python: How a host calls Python.
        environment: Variables that a command needs to run there.
        bad_zone: One that the provider does not have; None: it has no zones.
    """

    provider: Provider
    config: PodConfig
    lose_reply: Callable[[], None] | None = None
    preempt: Callable[[Pod, float], None] | None = None
    python: str = "python3"
    environment: Mapping[str, str] = field(default_factory=lambda: {"JAX_PLATFORMS": "cpu"})
    bad_zone: str | None = "mars-north1-a"

    @property
    def zone(self) -> str:
        return self.config.zones[0]

    def command(self, program: str) -> Command:
        argv = (self.python, "-c", textwrap.dedent(program))
        return Command(argv=argv, environment=dict(self.environment))

    def create(self, name, config=None, command=None):
        return self.provider.create(name, config or self.config, command=command)

    def until(self, name: str, wanted: PodState | None) -> Pod | None:
        """Wait until a pod is in a state, or gone for None."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            pod = self.provider.get(name, zone=self.zone)
            if (pod.state if pod else None) is wanted:
                return pod
            assert time.monotonic() < deadline, f"{name} is {pod}, not {wanted}"
            time.sleep(POLL_S)

    def run(self, name: str, program: str):
        """Start a program on a new pod; returns the pod and its gang."""
        command = self.command(program)
        self.create(name, command=command)
        pod = self.until(name, PodState.READY)
        return pod, self.provider.start(pod, command, attempt=1)


def events_until_end(gang, patience_s=PATIENCE_S):
    events, deadline = [], time.monotonic() + patience_s
    while not any(isinstance(event, Ended) for event in events):
        assert time.monotonic() < deadline, events
        events += gang.wait(0.2)
    return events


def ending_of(gang):
    return events_until_end(gang)[-1].ending


def is_running(process):
    """Whether a process of a host runs: emulated hosts are processes of this machine."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_lines(gang, text, count):
    lines, deadline = [], time.monotonic() + PATIENCE_S
    while len(lines) < count:
        assert time.monotonic() < deadline, lines
        events = gang.wait(0.2)
        assert not any(isinstance(event, Ended) for event in events), events
        lines += [one for one in events if isinstance(one, Line) and text in one.text]
    return lines


class ProviderConformance:
    """The suite."""

    def test_creating_twice_gives_one_pod(self, case):
        case.create("twice-a1")
        first = case.provider.get("twice-a1", zone=case.zone)
        case.create("twice-a1")
        again = case.provider.get("twice-a1", zone=case.zone)
        assert (first.name, first.created_at) == (again.name, again.created_at)
        assert [pod.name for pod in case.provider.list()] == ["twice-a1"]

    def test_what_is_not_there_is_no_error(self, case):
        assert case.provider.get("nobody-a1", zone=case.zone) is None
        case.provider.delete("nobody-a1", zone=case.zone)
        assert case.provider.list() == []

    def test_a_pod_becomes_ready_and_goes(self, case):
        asked = case.create("life-a1")
        assert not asked.state.is_lost
        pod = case.until("life-a1", PodState.READY)
        assert pod.provider == case.provider.name
        assert pod.slice == case.config.slice
        assert pod.zone == case.zone
        assert len(pod.hosts) == pod.slice.hosts
        places = [(host.slice_index, host.worker_id) for host in pod.hosts]
        assert places == sorted(places)
        assert len({host.name for host in pod.hosts}) == len(pod.hosts)
        case.provider.delete("life-a1", zone=case.zone)
        case.provider.delete("life-a1", zone=case.zone)
        case.until("life-a1", None)
        assert case.provider.list() == []

    def test_a_name_can_be_used_again(self, case):
        case.create("again-a1")
        case.provider.delete("again-a1", zone=case.zone)
        case.until("again-a1", None)
        case.create("again-a1")
        case.until("again-a1", PodState.READY)

    def test_a_lost_reply_gives_one_pod(self, case):
        if case.lose_reply is None:
            pytest.skip("no reply of this provider travels")
        case.lose_reply()
        assert case.create("lost-a1").name == "lost-a1"
        assert [pod.name for pod in case.provider.list()] == ["lost-a1"]

    def test_owners_are_told_apart(self, case):
        mine = case.config.with_labels(owner="me", job="owned", attempt="1")
        theirs = case.config.with_labels(owner="them", job="other", attempt="1")
        case.create("owned-a1", mine)
        case.create("other-a1", theirs)
        assert [pod.name for pod in case.provider.list(owner="me")] == ["owned-a1"]
        assert sorted(pod.name for pod in case.provider.list()) == ["other-a1", "owned-a1"]
        pod = case.provider.get("owned-a1", zone=case.zone)
        assert dict(pod.labels) == {"owner": "me", "job": "owned", "attempt": "1"}

    def test_an_unknown_zone_is_a_clear_error(self, case):
        if case.bad_zone is None:
            pytest.skip("this provider has no zones")
        with pytest.raises(TPUError, match=case.bad_zone):
            case.create("bad-a1", case.config.in_zone(case.bad_zone))
        assert case.provider.list() == []

    @pytest.mark.parametrize("tier", list(Tier))
    def test_tiers_hold_or_are_refused_with_a_reason(self, case, tier):
        config = replace(case.config, tier=tier)
        if tier.value in case.provider.capabilities.refused:
            with pytest.raises(TPUError):
                case.create("tier-a1", config)
            assert case.provider.list() == []
        else:
            assert case.create("tier-a1", config).tier is tier

    def test_a_bad_name_is_refused(self, case):
        with pytest.raises(TPUError, match="cannot name a pod"):
            case.create("Not_A_Name")

    def test_a_gang_runs_on_every_host(self, case):
        pod, gang = case.run(
            "runs-a1",
            """
            import os
            print("I am", os.environ["TPUKIT_HOST_ID"], "of", os.environ["TPUKIT_NUM_HOSTS"])
            """,
        )
        events = events_until_end(gang)
        lines = {(event.host, event.text) for event in events if isinstance(event, Line)}
        count = len(pod.hosts)
        assert lines >= {
            (host.name, f"I am {rank} of {count}") for rank, host in enumerate(pod.hosts)
        }
        assert events[-1].ending.cause is Cause.DONE
        gang.close()
        gang.close()

    def test_an_error_of_the_program_ends_the_gang(self, case):
        _, gang = case.run(
            "fails-a1",
            """
            import os, sys, time
            if os.environ["TPUKIT_HOST_ID"] == "0":
                sys.exit("this cannot work")
            time.sleep(600)
            """,
        )
        ending = ending_of(gang)
        assert ending.cause.kind is Kind.APPLICATION
        gang.close()

    def test_stopping_gives_time_to_save(self, case):
        pod, gang = case.run(
            "stops-a1",
            """
            import signal, sys, time
            def save(*_):
                print("saved", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("begun", flush=True)
            time.sleep(600)
            """,
        )
        wait_for_lines(gang, "begun", len(pod.hosts))
        gang.stop(grace_s=10)
        events = events_until_end(gang)
        assert {Line(host.name, "saved") for host in pod.hosts} <= {
            event for event in events if isinstance(event, Line)
        }
        gang.close()

    def test_closing_ends_everything_at_once(self, case):
        pod, gang = case.run(
            "closes-a1",
            "import os, time; print('begun', os.getpid(), flush=True); time.sleep(600)",
        )
        begun = wait_for_lines(gang, "begun", len(pod.hosts))
        processes = {int(line.text.split()[-1]) for line in begun}
        assert len(processes) == len(pod.hosts)
        assert all(is_running(process) for process in processes)
        gang.close()
        deadline = time.monotonic() + PATIENCE_S
        while left := [process for process in processes if is_running(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(POLL_S)

    def test_an_eviction_is_not_a_failure(self, case):
        if case.preempt is None:
            assert "preemption" in case.provider.capabilities.refused
            return
        pod, gang = case.run(
            "evicted-a1",
            """
            import os, signal, time
            # It may come twice, from machine and agent, and a print inside a print fails.
            signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"noticed\\n"))
            print("begun", flush=True)
            while True:
                time.sleep(600)
            """,
        )
        wait_for_lines(gang, "begun", len(pod.hosts))
        case.preempt(pod, 10.0)  # a busy machine takes a while to print
        events = events_until_end(gang)
        assert any(isinstance(event, Line) and event.text == "noticed" for event in events)
        assert events[-1].ending.cause.is_worth_restarting
        lost = case.until("evicted-a1", PodState.SUSPENDED)
        assert lost.cause is not None
        assert lost.cause.kind is Kind.EVICTION
        gang.close()
        case.provider.delete("evicted-a1", zone=case.zone)
        case.until("evicted-a1", None)
