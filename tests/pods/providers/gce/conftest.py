"""An emulated Compute Engine with machines, as short-lived as a test."""

import socket

import pytest
from emulated_tpus import PACE

from tpukit.job.sections import LaunchSettings
from tpukit.pods.providers.gce.provider import ComputeEngineProvider
from tpukit_emulators.compute_api.rehearsal import ComputeEngineRehearsal
from tpukit_emulators.holding import Reservation, Zone
from tpukit_emulators.world import World

ZONES = {
    "us-east5-a": Zone(
        {"v5p": 256, "v6e": 256},
        quota={"v5p": 32},
        spot_quota={"v6e": 64},
        reservations={"ours": Reservation("v5p", 16)},
    ),
    "us-central1-c": Zone({"7x": 256}),
    "europe-west4-a": Zone({"v6e": 64}),
}


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def cloud(tmp_path, state):
    world = World(ZONES, pace=PACE)
    with ComputeEngineRehearsal(tmp_path / "cloud", world=world) as made:
        yield made


@pytest.fixture
def launch(cloud):
    return LaunchSettings(**cloud.settings)


@pytest.fixture
def provider(launch):
    return ComputeEngineProvider(launch)


@pytest.fixture(autouse=True)
def asked_names(monkeypatch):
    """Names that are looked up; all but loopback's are refused, as with no network."""
    asked, look_up = set(), socket.getaddrinfo

    def spy(host, *arguments, **keywords):
        asked.add(host)
        if not str(host).startswith(("127.", "localhost")):
            raise socket.gaierror(socket.EAI_NONAME, "no network in tests")
        return look_up(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", spy)
    return asked
