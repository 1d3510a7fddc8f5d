"""The emulated Cloud TPU API as Google's unmodified client sees it."""

import asyncio
import datetime

import grpc
import pytest
from google.api_core import exceptions
from google.auth import jwt
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2, tpu_v2alpha1
from google.oauth2 import service_account

from tpukit_emulators.clock import DrivenClock
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.holding import Pace, Reservation, Zone
from tpukit_emulators.tpu_api.methods import recorded_methods
from tpukit_emulators.tpu_api.server import TPUAPI
from tpukit_emulators.world import World

ZONES = {
    "us-east5-b": Zone(
        {"v6e": 64},
        spot_quota={"v6e": 32},
        reservations={"ours": Reservation("v6e", 16)},
    ),
    "us-central1-a": Zone({"v5p": 128, "v5e": 16}),
}
PACE = Pace(decide_s=1, start_s=60, notice_s=30, release_s=1)
HERE = "projects/rehearsal/locations/us-east5-b"


@pytest.fixture
def clock():
    return DrivenClock()


@pytest.fixture
def api(tmp_path, authority, clock):
    world = World(ZONES, clock=clock, pace=PACE)
    emulator = TPUAPI(tmp_path, authority=authority, world=world)
    yield emulator
    emulator.close()


def connect(api, module=tpu_v2, account=None, credentials=None):
    if credentials is None:
        key_file = (account or api.owner).key_file
        credentials = service_account.Credentials.from_service_account_file(str(key_file))
    return module.TpuClient(credentials=credentials, client_options={"api_endpoint": api.endpoint})


@pytest.fixture
def client(api):
    return connect(api)


def wanted(*, node_id="p", slices=1, parent=HERE, until_s=None, **node):
    spec = {
        "parent": parent,
        "node": {
            "accelerator_type": "v6e-16",
            "runtime_version": "v2-alpha-tpuv6e",
            "labels": {"owner": "me"},
        }
        | node,
    }
    if slices > 1:
        spec["multislice_params"] = {"node_count": slices, "node_id_prefix": node_id}
    else:
        spec["node_id"] = node_id
    asked = {"tpu": {"node_spec": [spec]}, "spot": {}}
    if until_s is not None:
        asked["queueing_policy"] = {"valid_until_duration": {"seconds": until_s}}
    return tpu_v2.QueuedResource(asked)


def create(client, queued_id="q", request_id="", parent=HERE, **asked):
    return client.create_queued_resource(
        tpu_v2.CreateQueuedResourceRequest(
            parent=parent,
            queued_resource_id=queued_id,
            queued_resource=wanted(parent=parent, **asked),
            request_id=request_id,
        )
    )


def state_of(client, queued_id="q"):
    return client.get_queued_resource(name=f"{HERE}/queuedResources/{queued_id}").state.state.name


def test_all_methods_of_the_installed_client_are_known():
    v2 = {method.name for method in recorded_methods(tpu_v2)}
    alpha = {method.name for method in recorded_methods(tpu_v2alpha1)}
    assert {"CreateQueuedResource", "ListNodes", "GetOperation", "ListLocations"} <= v2
    assert {"SimulateMaintenanceEvent", "ListReservations"} <= alpha - v2
    assert (len(v2), len(alpha)) == (24, 28)


def test_a_queued_resource_lives_its_whole_life(api, client, clock):
    operation = create(client)
    assert state_of(client) == "CREATING"
    clock.advance(1)
    assert operation.result(timeout=5).name == f"{HERE}/queuedResources/q"
    assert state_of(client) == "PROVISIONING"
    assert client.get_node(name=f"{HERE}/nodes/p").state.name == "CREATING"
    clock.advance(60)
    assert state_of(client) == "ACTIVE"
    node = client.get_node(name=f"{HERE}/nodes/p")
    assert node.state.name == "READY"
    assert len(node.network_endpoints) == 4  # v6e-16 is four hosts
    assert dict(node.labels) == {"owner": "me"}
    assert api.cloud.preempt("q")
    assert state_of(client) == "SUSPENDING"
    clock.advance(30)
    shown = client.get_queued_resource(name=f"{HERE}/queuedResources/q")
    assert (shown.state.state.name, shown.state.state_initiator.name) == ("SUSPENDED", "SERVICE")
    assert client.get_node(name=f"{HERE}/nodes/p").state.name == "PREEMPTED"
    deleting = client.delete_queued_resource(name=f"{HERE}/queuedResources/q")
    assert state_of(client) == "DELETING"
    clock.advance(1)
    deleting.result(timeout=5)
    with pytest.raises(exceptions.NotFound):
        state_of(client)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=f"{HERE}/nodes/p")


def test_a_deletion_with_nodes_needs_force(client, clock):
    create(client)
    clock.advance(100)
    name = f"{HERE}/queuedResources/q"
    with pytest.raises(exceptions.FailedPrecondition):
        client.delete_queued_resource(name=name)
    client.delete_queued_resource(tpu_v2.DeleteQueuedResourceRequest(name=name, force=True))
    clock.advance(1)
    assert not list(client.list_queued_resources(parent=HERE))


def test_the_same_request_id_gives_one_resource(client, clock):
    first = create(client, request_id="3f6c")
    again = create(client, request_id="3f6c")
    assert first.operation.name == again.operation.name
    with pytest.raises(exceptions.AlreadyExists):
        create(client, request_id="other")
    assert len(list(client.list_queued_resources(parent=HERE))) == 1


def test_slices_are_nodes_of_one_resource(api, client, clock):
    create(client, slices=2)
    clock.advance(100)
    nodes = list(client.list_nodes(parent=HERE))
    assert [node.name.rsplit("/", 1)[1] for node in nodes] == ["p-0", "p-1"]
    assert all(node.multislice_node for node in nodes)
    api.cloud.preempt("q", node=1)
    clock.advance(30)
    assert [node.state.name for node in client.list_nodes(parent=HERE)] == ["READY", "PREEMPTED"]
    assert state_of(client) == "SUSPENDED"


def test_quota_is_held_until_a_lost_resource_is_deleted(api, client, clock):
    create(client, "a", node_id="a")
    create(client, "b", node_id="b")
    clock.advance(100)
    api.cloud.preempt("a")
    clock.advance(100)
    with pytest.raises(exceptions.ResourceExhausted, match="Quota limit 'TPUV6EPreemptible"):
        create(client, "c", node_id="c")
    client.delete_queued_resource(name=f"{HERE}/queuedResources/a")
    clock.advance(1)
    create(client, "c", node_id="c")


def test_a_request_that_is_not_served_in_time_fails(api, client, clock):
    api.world.sell_out("us-east5-b", "v6e")
    create(client, until_s=600)
    clock.advance(599)
    assert state_of(client) == "WAITING_FOR_RESOURCES"
    clock.advance(1)
    shown = client.get_queued_resource(name=f"{HERE}/queuedResources/q")
    assert shown.state.state.name == "FAILED"
    assert "valid until" in shown.state.failed_data.error.message


def test_reset_asks_again(api, client, clock):
    create(client)
    clock.advance(100)
    api.cloud.preempt("q")
    clock.advance(100)
    client.reset_queued_resource(name=f"{HERE}/queuedResources/q")
    clock.advance(100)
    assert state_of(client) == "ACTIVE"


def test_v2alpha1_shows_the_same_cloud_with_its_maintenance(api, client, clock):
    create(client, slices=2)
    clock.advance(100)
    alpha = connect(api, tpu_v2alpha1)
    shown = alpha.get_queued_resource(name=f"{HERE}/queuedResources/q")
    assert shown.tpu.node_spec[0].multi_node_params.node_count == 2
    assert "spot" in shown
    api.world.announce_maintenance(shown.name, in_s=3600)
    window = alpha.get_node(name=f"{HERE}/nodes/p-0").upcoming_maintenance
    assert window.maintenance_status.name == "PENDING"
    starts = datetime.datetime.fromisoformat(window.window_start_time).timestamp()
    assert starts == clock.now() + 3600
    alpha.simulate_maintenance_event(
        tpu_v2alpha1.SimulateMaintenanceEventRequest(name=f"{HERE}/nodes/p-0")
    ).result(timeout=5)
    clock.advance(30)
    assert client.get_node(name=f"{HERE}/nodes/p-1").health.name == "UNHEALTHY_MAINTENANCE"
    assert [one.name for one in alpha.list_reservations({"parent": HERE})] == [
        f"{HERE}/reservations/ours"
    ]


def test_offers_are_listed(client):
    types = [one.type_ for one in client.list_accelerator_types(parent=HERE)]
    assert "v6e-64" in types
    assert not any(one.startswith("v5p") for one in types)
    versions = [one.version for one in client.list_runtime_versions(parent=HERE)]
    assert "v2-alpha-tpuv6e" in versions
    zones = client.list_locations({"name": "projects/rehearsal"}).locations
    assert [one.location_id for one in zones] == sorted(ZONES)


def test_lists_come_in_pages(client, clock):
    for number in range(2):
        create(client, f"q{number}", node_id=f"n{number}")
    client.delete_queued_resource(name=f"{HERE}/queuedResources/q0")
    clock.advance(100)
    create(client, "q2", node_id="n2")
    pages = client.list_queued_resources(
        tpu_v2.ListQueuedResourcesRequest(parent=HERE, page_size=1)
    ).pages
    assert [len(page.queued_resources) for page in pages] == [1, 1]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"accelerator_type": "v5p-8"}, exceptions.InvalidArgument),
        ({"accelerator_type": "v6e-7"}, exceptions.InvalidArgument),
        ({"runtime_version": "2.8.0"}, exceptions.InvalidArgument),
        ({"node_id": ""}, exceptions.InvalidArgument),
        ({"parent": "projects/rehearsal/locations/mars-1a"}, exceptions.PermissionDenied),
        ({"parent": "projects/theirs/locations/us-east5-b"}, exceptions.PermissionDenied),
    ],
)
def test_wrong_requests_are_refused(api, client, asked, error):
    with pytest.raises(error):
        create(client, **asked)
    assert not api.world.holdings()


def test_only_those_with_a_valid_token_get_in(api, tmp_path):
    with pytest.raises(exceptions.Unauthenticated):
        connect(api, credentials=AnonymousCredentials()).get_node(name=f"{HERE}/nodes/p")
    stranger = TPUAPI(tmp_path / "other", world=api.world)
    stranger.close()
    with pytest.raises(exceptions.Unauthenticated):
        connect(api, account=stranger.owner).get_node(name=f"{HERE}/nodes/p")
    wrong = jwt.Credentials.from_service_account_file(
        str(api.owner.key_file), audience="https://storage.googleapis.com/"
    )
    with pytest.raises(exceptions.Unauthenticated):
        connect(api, credentials=wrong).get_node(name=f"{HERE}/nodes/p")
    expired = jwt.Credentials.from_service_account_file(
        str(api.owner.key_file), audience="https://tpu.googleapis.com/", token_lifetime=-3600
    )
    with pytest.raises(exceptions.Unauthenticated):
        connect(api, credentials=expired).get_node(name=f"{HERE}/nodes/p")


def test_permissions_are_checked(api):
    reader = api.accounts.add("reader", may=("tpu.*.list", "tpu.*.get"))
    client = connect(api, account=reader)
    assert not list(client.list_nodes(parent=HERE))
    with pytest.raises(exceptions.PermissionDenied, match=r"tpu\.queuedresources\.create"):
        create(client)


def test_a_lost_reply_leaves_what_was_done(api, client):
    api.faults.add(Fault(Mishap.LOST_REPLY, "CreateQueuedResource"))
    with pytest.raises(exceptions.ServiceUnavailable):
        create(client, request_id="1")
    create(client, request_id="1")
    assert len(list(client.list_queued_resources(parent=HERE))) == 1


def test_an_outage_does_nothing(api, client):
    api.faults.add(Fault(Mishap.OUTAGE, "*", times=None))
    with pytest.raises(exceptions.ServiceUnavailable):
        create(client)
    assert not api.world.holdings()


def test_the_asynchronous_client_works_too(api, clock):
    async def get():
        credentials = service_account.Credentials.from_service_account_file(str(api.owner.key_file))
        client = tpu_v2.TpuAsyncClient(
            credentials=credentials, client_options={"api_endpoint": api.endpoint}
        )
        await client.create_queued_resource(
            parent=HERE, queued_resource_id="q", queued_resource=wanted()
        )
        clock.advance(100)
        return await client.get_queued_resource(name=f"{HERE}/queuedResources/q")

    assert asyncio.run(get()).state.state.name == "ACTIVE"


def test_plain_text_is_not_answered(api):
    channel = grpc.insecure_channel(api.endpoint)
    with pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(timeout=1)
    channel.close()
