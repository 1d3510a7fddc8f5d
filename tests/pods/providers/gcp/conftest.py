"""An emulated Cloud TPU with machines, as short-lived as a test."""

import pytest
from emulated_tpus import cloud_tpu

from tpukit.job.sections import LaunchSettings
from tpukit.pods.providers.gcp.provider import CloudTPUProvider
from tpukit_emulators.holding import Reservation, Zone

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
    with cloud_tpu(tmp_path, authority, ZONES) as made:
        yield made


@pytest.fixture
def launch(cloud):
    return LaunchSettings(**cloud.settings)


@pytest.fixture
def provider(launch):
    return CloudTPUProvider(launch)
