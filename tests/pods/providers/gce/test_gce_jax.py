"""Real jax processes on emulated machines of Compute Engine: they meet, and find their devices."""

import pytest

from conformance import Case, events_until_end
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.protocol import Line

pytestmark = [pytest.mark.xdist_group("pods-processes"), pytest.mark.slow]
PROGRAM = """
import jax
import numpy
from jax.experimental.multihost_utils import process_allgather
from tpukit.runtime.multihost import MultiHostConfig

with MultiHostConfig.from_environment():
    met = process_allgather(numpy.array(jax.process_index())).tolist()
    print("devices", jax.local_device_count(), "of", jax.device_count(), "met", met, flush=True)
"""


def test_hosts_of_tpu7x_join_into_one_runtime(provider):
    config = PodConfig(tpu_type="tpu7x-2x2x2", zones=("us-central1-c",))
    pod, gang = Case(provider=provider, config=config, environment={}).run("jax-a1", PROGRAM)
    events = events_until_end(gang, patience_s=180)
    gang.close()
    lines = [event.text for event in events if isinstance(event, Line)]
    assert lines.count(f"devices 8 of {pod.slice.devices} met [0, 1]") == 2, events
