"""Orders over HTTP to an emulated cloud."""

import http.client
import json

import pytest

from tpukit_emulators.clock import DrivenClock
from tpukit_emulators.control import ControlPort
from tpukit_emulators.faults import Faults, Mishap
from tpukit_emulators.holding import Pace, Zone
from tpukit_emulators.tpu_api.cloud import Cloud
from tpukit_emulators.tpu_api.versions import V2
from tpukit_emulators.world import World

HERE = "projects/p/locations/z"


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def port(faults):
    pace = Pace(decide_s=1, start_s=10, notice_s=30)
    cloud = Cloud(World({"z": Zone({"v6e": 64})}, clock=DrivenClock(), pace=pace))
    node = {"accelerator_type": "v6e-8", "runtime_version": "v2-alpha-tpuv6e"}
    spec = {"parent": HERE, "node_id": "n", "node": node}
    asked = V2.message("QueuedResource")(tpu={"node_spec": [spec]})
    cloud.create(HERE, "job-a1", asked, "")
    made = ControlPort(cloud, faults)
    yield made
    made.close()


def tell(port, path, order=None, **headers):
    connection = http.client.HTTPConnection(port.address)
    if order is None:
        connection.request("GET", path, headers=headers)
    else:
        connection.request("POST", path, json.dumps(order), headers=headers)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    connection.close()
    return reply.status, content


def stage(port):
    return tell(port, "/")[1]["holdings"][0]["stage"]


def test_a_pod_is_preempted_by_its_short_name(port):
    assert stage(port) == "new"
    assert tell(port, "/advance", {"seconds": 20}) == (200, {"done": True})
    assert stage(port) == "running"
    assert tell(port, "/preempt", {"name": "job-a1", "notice_s": 5})[0] == 200
    assert stage(port) == "leaving"
    tell(port, "/advance", {"seconds": 5})
    assert stage(port) == "lost"


def test_capacity_is_shown_and_sold_out(port):
    assert tell(port, "/")[1]["free"] == {"z": {"v6e": 64}}
    tell(port, "/sell-out", {"zone": "z", "kind": "v6e"})
    assert tell(port, "/")[1]["free"] == {"z": {"v6e": 0}}
    tell(port, "/restock", {"zone": "z", "kind": "v6e"})
    assert tell(port, "/")[1]["free"] == {"z": {"v6e": 64}}


def test_a_start_fails_and_maintenance_comes(port):
    assert tell(port, "/maintain", {"name": "job-a1"})[1] == {"done": False}  # it does not run yet
    assert tell(port, "/fail", {"name": "job-a1", "reason": "no capacity"})[1] == {"done": True}
    assert stage(port) == "refused"


def test_calls_go_wrong(port, faults):
    tell(port, "/fault", {"mishap": "lost_reply", "calls": "Create*"})
    assert faults.strike("CreateQueuedResource").mishap is Mishap.LOST_REPLY
    assert faults.strike("CreateQueuedResource") is None


@pytest.mark.parametrize(
    ("path", "order", "status"),
    [
        ("/preempt", {"name": "nobody"}, 400),
        ("/preempt", {"nam": "job-a1"}, 400),
        ("/fault", {"mishap": "earthquake"}, 400),
        ("/explode", {}, 404),
    ],
)
def test_orders_that_are_not_understood(port, path, order, status):
    seen, content = tell(port, path, order)
    assert seen == status
    assert content["error"]


def test_web_pages_give_no_orders(port):
    order = {"name": "job-a1"}
    assert tell(port, "/preempt", order, Host="evil.example")[0] == 403
    assert tell(port, "/preempt", order, Origin="https://evil.example")[0] == 403
