"""Real jax processes on emulated machines: they meet, and every one finds its slice's devices."""

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


def test_hosts_join_into_one_runtime(provider):
    case = Case(
        provider=provider,
        config=PodConfig(tpu_type="2xv6e-8", zones=("us-east5-b",)),
        environment={},
    )
    pod, gang = case.run("jax-a1", PROGRAM)
    events = events_until_end(gang, patience_s=180)
    gang.close()
    lines = {event.text for event in events if isinstance(event, Line)}
    assert f"devices 8 of {pod.slice.devices} met [0, 1]" in lines, events
