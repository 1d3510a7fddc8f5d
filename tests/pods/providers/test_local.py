import sys
import time

import pytest

from tpukit.errors import ConfigError, PodUnavailable, ProviderError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import PodConfig, PodState, Tier, open_provider
from tpukit.pods.causes import Cause
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.pods.providers.protocol import Command, Ended

SLEEP = Command(argv=(sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"))


def ask(slice_name="v6e-16", *, zone="local-a", **details):
    return PodConfig(tpu_type=slice_name, zones=(zone,), **details)


@pytest.fixture
def opened(tmp_path):
    return lambda **details: LocalProvider(folder=tmp_path / "pods", **details)


def ending_of(gang, limit_s=20):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for event in gang.wait(1):
            if isinstance(event, Ended):
                return event.ending
    raise AssertionError("the gang goes on")


def test_a_pod_has_the_hosts_of_its_slice_and_asking_again_changes_nothing(opened):
    provider = opened()
    pod = provider.create("job-a1", ask("2xv6e-8", labels={"owner": "me"}))
    assert pod.state is PodState.READY
    assert [(host.slice_index, host.worker_id) for host in pod.hosts] == [
        *((0, 0), (1, 0)),
    ]
    assert provider.create("job-a1", ask("v6e-16")) == pod
    assert opened().get("job-a1", zone="local-a") == pod  # another process would see the same
    assert opened().list(owner="me") == [pod]
    assert opened().list(owner="you") == []
    provider.delete("job-a1", zone="local-a")
    provider.delete("job-a1", zone="local-a")
    assert provider.get("job-a1", zone="local-a") is None


def test_pods_wait_for_room_by_priority_and_then_by_age(opened):
    provider = opened(hosts=4)
    first = provider.create("first", ask())
    late = [("low", 0), ("high", 5), ("higher", 9)]
    for name, priority in late:
        assert provider.create(name, ask("v6e-8", priority=priority)).state is PodState.WAITING
    provider.delete(first.name, zone="local-a")
    states = {pod.name: pod.state for pod in provider.list()}
    assert states == {
        "higher": PodState.READY,
        "high": PodState.READY,
        "low": PodState.READY,
    }
    big = provider.create("big", ask("v6e-16", priority=1))
    small = provider.create("small", ask("v6e-8"))
    assert big.state is small.state is PodState.WAITING  # the small one does not overtake


def test_what_can_never_be_had_is_refused_with_a_cause(opened):
    provider = opened(hosts={"local-a": 2, "local-b": 0})
    with pytest.raises(PodUnavailable, match=r"4 processes .* room for 2") as refused:
        provider.create("job-a1", ask())
    assert refused.value.cause == Cause.UNPLACEABLE
    with pytest.raises(PodUnavailable, match="another zone") as refused:
        provider.create("job-a1", ask(zone="local-b"))
    assert refused.value.cause == Cause.STOCKOUT
    with pytest.raises(ConfigError, match="Did you mean 'local-a'"):
        provider.create("job-a1", ask(zone="locale-a"))
    assert provider.list() == []
    (finding,) = provider.preflight(ask())
    assert finding.severity == "error"
    assert provider.create("job-a1", ask(zone="local-c")).is_ready


@pytest.mark.parametrize(
    "zone", ["us-central1-a", "europe-west4-b", "asia-northeast1-b", "me-west1-a", "us-south1-ai1b"]
)
def test_a_zone_of_a_cloud_is_a_zone_here(opened, zone):
    provider = opened(hosts=4)
    pod = provider.create("job-a1", ask(zone=zone))
    assert (pod.zone, pod.state) == (zone, PodState.READY)
    assert provider.create("job-a2", ask(zone=zone)).state is PodState.WAITING
    provider.delete("job-a1", zone=zone)
    assert provider.get("job-a2", zone=zone).state is PodState.READY


@pytest.mark.parametrize(
    "zone", ["../us-central1-a", "us-central1", "", "US-CENTRAL1-A", "a/b-c1-d"]
)
def test_what_can_be_no_zone_is_refused(opened, zone):
    with pytest.raises(ConfigError, match="any zone of a cloud"):
        opened().create("job-a1", ask(zone=zone))


def test_room_is_read_from_the_environment(opened, monkeypatch):
    monkeypatch.setenv("TPUKIT_LOCAL_HOSTS", "local-a=0, local-b=8")
    (finding,) = opened().preflight(ask(zone="local-b"))
    assert "room for 8" in finding.seen
    monkeypatch.setenv("TPUKIT_LOCAL_HOSTS", "many")
    with pytest.raises(ConfigError, match="'many'"):
        opened()


def test_a_pod_whose_processes_are_gone_says_so(opened):
    provider = opened()
    pod = provider.create("job-a1", ask())
    gang = provider.start(pod, SLEEP, attempt=1)
    gang.wait(5)
    assert opened().get("job-a1", zone="local-a").reason == ""
    for member in gang._members:  # as if their supervisor had been killed
        member.process.kill()
        member.process.wait()
    assert "processes are gone" in opened().get("job-a1", zone="local-a").reason
    gang.close()
    assert opened().get("job-a1", zone="local-a").reason == ""


@pytest.mark.parametrize("notice_s", [0.0, 5.0])
def test_a_pod_is_preempted_by_whoever_asks(opened, notice_s):
    provider = opened()
    pod = provider.create("job-a1", ask(tier=Tier.SPOT))
    gang = provider.start(pod, SLEEP, attempt=1)
    gang.wait(5)
    opened().preempt("job-a1", zone="local-a", notice_s=notice_s)
    assert ending_of(gang).cause is (Cause.NOTICE if notice_s else Cause.KILLED)
    gang.close()
    lost = provider.get("job-a1", zone="local-a")
    assert (lost.state, lost.tier) == (PodState.SUSPENDED, Tier.SPOT)
    with pytest.raises(ProviderError, match="suspended"):
        provider.start(lost, SLEEP, attempt=2)


def test_deleting_a_pod_ends_what_runs_on_it(opened):
    provider = opened()
    gang = provider.start(provider.create("job-a1", ask()), SLEEP, attempt=1)
    gang.wait(5)
    opened().delete("job-a1", zone="local-a")
    assert ending_of(gang).cause is Cause.KILLED
    gang.close()


def test_it_is_the_provider_when_none_is_named(monkeypatch):
    monkeypatch.delenv("TPUKIT_PROVIDER", raising=False)
    assert isinstance(open_provider(launch=LaunchSettings()), LocalProvider)
