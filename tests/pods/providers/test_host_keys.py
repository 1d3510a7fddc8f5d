"""Hosts are known by the keys that the provider's own channel tells, before anybody logs in."""

import socket
import time

import pytest
from emulated_tpus import PACE, cloud_tpu

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig, PodState
from tpukit.pods.causes import Cause
from tpukit.pods.providers.gce.provider import ComputeEngineProvider
from tpukit.pods.providers.gcp.provider import CloudTPUProvider
from tpukit.pods.providers.protocol import Ended
from tpukit_emulators.compute_api.rehearsal import ComputeEngineRehearsal
from tpukit_emulators.holding import Zone
from tpukit_emulators.hosts import EmulatedHosts
from tpukit_emulators.world import World

pytestmark = pytest.mark.xdist_group("pods-processes")
ZONE = "us-east5-b"
CONFIG = PodConfig(tpu_type="v6e-16", zones=(ZONE,))


@pytest.fixture(params=["gcp", "gce"])
def provider(request, tmp_path, authority, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    zones = {ZONE: Zone({"v6e": 64})}
    if request.param == "gcp":
        with cloud_tpu(tmp_path, authority, zones) as cloud:
            yield CloudTPUProvider(LaunchSettings(**cloud.settings))
        return
    monkeypatch.setattr(socket, "getaddrinfo", only_loopback(socket.getaddrinfo))
    world = World(zones, pace=PACE)
    with ComputeEngineRehearsal(tmp_path / "cloud", world=world) as cloud:
        yield ComputeEngineProvider(LaunchSettings(**cloud.settings))


def only_loopback(look_up):
    def spy(host, *arguments, **keywords):
        if not str(host).startswith(("127.", "localhost")):
            raise socket.gaierror(socket.EAI_NONAME, "no network in tests")
        return look_up(host, *arguments, **keywords)

    return spy


def ending(provider):
    """Run a command on every host of a pod, and return how that ended."""
    provider.create("keys-a1", CONFIG)
    deadline = time.monotonic() + 60
    while (pod := provider.get("keys-a1", zone=ZONE)).state is not PodState.READY:
        assert time.monotonic() < deadline, pod
        time.sleep(0.02)
    gang = provider.start(pod, Command(argv=("true",)), attempt=1)
    try:
        while time.monotonic() < deadline:
            for event in gang.wait(0.5):
                if isinstance(event, Ended):
                    return event.ending
        raise AssertionError("it did not end")
    finally:
        gang.close()


def files(tmp_path, ending_in=""):
    return sorted((tmp_path / "state" / "known_hosts").glob(f"*{ending_in}"))


def test_the_keys_that_hosts_publish_are_used(provider, tmp_path):
    assert ending(provider).cause is Cause.DONE
    (file,) = files(tmp_path)
    assert file.name.endswith(".told")
    lines = [line.split() for line in file.read_text().splitlines()]
    assert len({name for name, _, _ in lines}) == 4, "one line for each host"
    assert {kind for _, kind, _ in lines} == {"ssh-ed25519"}
    provider.delete("keys-a1", zone=ZONE)
    assert files(tmp_path) == []


def test_a_host_that_shows_another_key_is_not_let_near_the_job(provider, monkeypatch):
    other = "AAAAC3NzaC1lZDI1NTE5AAAAIGYx0P3nUEMLr4Vb0DXuS8R9t2cZp6aGZ1lq0m3kQz7v"
    monkeypatch.setattr(EmulatedHosts, "host_key", property(lambda self: ("ssh-ed25519", other)))
    told = ending(provider)
    assert told.cause is Cause.UNREACHABLE
    assert "Host key verification failed" in str(told)


def test_without_published_keys_the_first_connection_is_trusted(provider, monkeypatch, tmp_path):
    api = type(provider._api)
    monkeypatch.setattr(api, "host_keys", lambda self, host, zone: [])
    assert ending(provider).cause is Cause.DONE
    assert files(tmp_path)
    assert not files(tmp_path, ".told")
