"""An emulated Cloud TPU with machines, as short-lived as a test."""

import pytest

from tpukit.job.sections import LaunchSettings
from tpukit.pods.emulators.holding import Pace, Reservation, Zone
from tpukit.pods.emulators.rehearsal import CloudTPURehearsal
from tpukit.pods.emulators.world import World
from tpukit.pods.providers.gcp.provider import CloudTPUProvider

ZONES = {
    "us-east5-b": Zone(
        {"v6e": 256},
        spot_quota={"v6e": 64},
        reservations={"ours": Reservation("v6e", 16)},
    ),
    "us-central1-a": Zone({"v5p": 256, "v3": 64}),
    "europe-west4-b": Zone({"v5p": 64}),
}


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def cloud(tmp_path, authority, state):
    world = World(ZONES, pace=Pace(decide_s=0.01, start_s=0.02, release_s=0.01, notice_s=1.0))
    with CloudTPURehearsal(tmp_path / "cloud", world=world, authority=authority) as made:
        yield made


@pytest.fixture
def launch(cloud):
    return LaunchSettings(**cloud.settings)


@pytest.fixture
def provider(launch):
    return CloudTPUProvider(launch)
