"""Emulated clouds as quick as a test, and what settings of a real one must not reach it."""

from contextlib import contextmanager

from tpukit_emulators.holding import Pace
from tpukit_emulators.rehearsal import CloudTPURehearsal
from tpukit_emulators.world import World

PACE = Pace(decide_s=0.01, start_s=0.02, release_s=0.01, notice_s=1.0)
SETTINGS = (
    *("TPU_PROJECT", "TPU_ZONE", "TPU_NETWORK", "TPUKIT_PROVIDER"),
    "GOOGLE_APPLICATION_CREDENTIALS",
)
# The configuration of document 004.
FLAT = """
# tpu_config.yaml
project: "your-gcp-project"
zone: "us-central1-a"
network: "default"
accelerator_type: "v3-8"
software_version: "2.8.0"
enable_ip_alias: true
reserved: false
"""


@contextmanager
def cloud_tpu(folder, authority, zones):
    """Google's Cloud TPU API with machines in these zones."""
    world = World(zones, pace=PACE)
    with CloudTPURehearsal(folder / "cloud", world=world, authority=authority) as made:
        yield made


def forget_settings(monkeypatch):
    """Leave nothing around that says which cloud is meant."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
