"""The emulated Compute Engine API as Google's unmodified client sees it."""

import time
import uuid

import pytest
import requests
from google.api_core import exceptions
from google.auth import jwt
from google.auth.transport.requests import Request
from google.cloud import compute_v1
from google.oauth2 import service_account

from tpukit_emulators.clock import DrivenClock
from tpukit_emulators.compute_api.methods import recorded_methods
from tpukit_emulators.compute_api.server import ComputeAPI
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.holding import Pace, Reservation, Zone
from tpukit_emulators.identity import SCOPE
from tpukit_emulators.world import World

ZONES = {
    "us-east5-a": Zone(
        {"v5p": 32, "v6e": 64},
        quota={"v5p": 24},
        spot_quota={"v6e": 32},
        reservations={"ours": Reservation("v5p", 16)},
    ),
    "us-central1-c": Zone({"7x": 16}),
}
PACE = Pace(decide_s=1, start_s=60, notice_s=30, release_s=1)
ZONE, REGION, PROJECT = "us-east5-a", "us-east5", "rehearsal"
QUIET = {"retry": None, "timeout": 5}


class Client:
    """The clients that a user of Compute Engine needs, all with one endpoint."""

    def __init__(self, api, account=None, credentials=None):
        if credentials is None:
            # Signs each call, and asks nobody else: service_account.Credentials would look up
            # the account's regions at Google in the background.
            credentials = jwt.Credentials.from_service_account_file(
                str((account or api.owner).key_file),
                audience=None,
                additional_claims={"scope": SCOPE},
            )
        options = {"credentials": credentials, "client_options": {"api_endpoint": api.endpoint}}
        self.groups = compute_v1.InstanceGroupManagersClient(**options)
        self.templates = compute_v1.InstanceTemplatesClient(**options)
        self.policies = compute_v1.ResourcePoliciesClient(**options)
        self.instances = compute_v1.InstancesClient(**options)
        self.zones = compute_v1.ZonesClient(**options)
        self.regions = compute_v1.RegionsClient(**options)
        self.machine_types = compute_v1.MachineTypesClient(**options)
        self.zone_operations = compute_v1.ZoneOperationsClient(**options)
        self.region_operations = compute_v1.RegionOperationsClient(**options)
        self.global_operations = compute_v1.GlobalOperationsClient(**options)


@pytest.fixture
def clock():
    return DrivenClock()


@pytest.fixture
def api(tmp_path, clock):
    emulator = ComputeAPI(tmp_path, world=World(ZONES, clock=clock, pace=PACE))
    yield emulator
    emulator.close()


@pytest.fixture
def client(api):
    return Client(api)


def template(client, clock, name="t", *, machine="ct5p-hightpu-4t", model="STANDARD", **more):
    scheduling = {"provisioning_model": model, "on_host_maintenance": "TERMINATE"}
    asked = {
        "name": name,
        "properties": {
            "machine_type": machine,
            "disks": [{"boot": True, "initialize_params": {"source_image": "i"}}],
            "network_interfaces": [{"network": "global/networks/default"}],
            "scheduling": scheduling | more.pop("scheduling", {}),
            "labels": {"owner": "me"},
            "metadata": {"items": [{"key": "ssh-keys", "value": "me:ssh-ed25519 AAAA"}]},
        }
        | more,
    }
    began = client.templates.insert_unary(
        project=PROJECT, instance_template_resource=compute_v1.InstanceTemplate(asked), **QUIET
    )
    clock.advance(2)
    return began


def policy(client, clock, name="p", topology="2x2x2"):
    asked = {
        "name": name,
        "workload_policy": {
            "type_": "HIGH_THROUGHPUT",
            "accelerator_topology": topology,
            "accelerator_topology_mode": "AUTO_CONNECT",
        },
    }
    began = client.policies.insert_unary(
        project=PROJECT,
        region=REGION,
        resource_policy_resource=compute_v1.ResourcePolicy(asked),
        **QUIET,
    )
    clock.advance(2)
    return began


def insert_group(
    client, name="g", *, size=2, mode="BULK", with_policy=True, request_id=None, zone=ZONE
):
    asked = {
        "name": name,
        "base_instance_name": name,
        "versions": [{"instance_template": f"projects/{PROJECT}/global/instanceTemplates/t"}],
        "target_size": size,
        "target_size_policy": {"mode": mode},
        "instance_lifecycle_policy": {"default_action_on_failure": "DO_NOTHING"},
    }
    if with_policy:
        asked["resource_policies"] = {
            "workload_policy": f"projects/{PROJECT}/regions/{REGION}/resourcePolicies/p"
        }
    return client.groups.insert_unary(
        compute_v1.InsertInstanceGroupManagerRequest(
            project=PROJECT,
            zone=zone,
            instance_group_manager_resource=compute_v1.InstanceGroupManager(asked),
            request_id=request_id,
        ),
        **QUIET,
    )


def make_group(client, clock, name="g", *, topology="2x2x2", machine="ct5p-hightpu-4t", **how):
    model = how.pop("model", "STANDARD")
    template(client, clock, machine=machine, model=model, **how.pop("template", {}))
    policy(client, clock, topology=topology)
    began = insert_group(client, name, **how)
    clock.advance(1.5)
    return began


def get_group(client, name="g"):
    return client.groups.get(project=PROJECT, zone=ZONE, instance_group_manager=name, **QUIET)


def managed(client, name="g"):
    return list(
        client.groups.list_managed_instances(
            project=PROJECT, zone=ZONE, instance_group_manager=name, **QUIET
        )
    )


def topology_state(client, name="g"):
    (one,) = get_group(client, name).status.applied_accelerator_topologies
    return one.state


def operation(client, began):
    return client.zone_operations.get(project=PROJECT, zone=ZONE, operation=began.name, **QUIET)


def test_all_methods_of_the_client_are_known():
    names = {method.full_name for method in recorded_methods()}
    assert {"instanceGroupManagers.listManagedInstances", "zoneOperations.wait"} <= names
    assert len(names) > 100


def test_a_group_is_there_before_its_machines_and_they_before_the_slice(client, clock):
    began = make_group(client, clock)
    assert operation(client, began).status == compute_v1.Operation.Status.DONE
    assert not get_group(client).status.is_stable
    assert {one.current_action for one in managed(client)} == {"CREATING"}
    clock.advance(2)
    assert topology_state(client) == "ACTIVATING"
    assert {one.instance_status for one in managed(client)} == {"STAGING"}
    clock.advance(40)
    assert {one.instance_status for one in managed(client)} == {"RUNNING"}
    assert topology_state(client) == "ACTIVATING"
    clock.advance(30)
    assert topology_state(client) == "ACTIVE"
    assert get_group(client).status.is_stable
    assert {one.current_action for one in managed(client)} == {"NONE"}


def test_machines_have_addresses_labels_and_their_number_in_the_slice(client, clock):
    make_group(client, clock)
    clock.advance(90)
    shown = list(
        client.instances.list(
            compute_v1.ListInstancesRequest(
                project=PROJECT, zone=ZONE, filter='labels.owner = "me"'
            ),
            **QUIET,
        )
    )
    assert [one.name for one in shown] == sorted(one.name for one in managed(client))
    numbers = {
        item.value
        for one in shown
        for item in one.metadata.items
        if item.key == "agent-worker-number"
    }
    assert numbers == {"0", "1"}
    one = client.instances.get(project=PROJECT, zone=ZONE, instance=shown[0].name, **QUIET)
    assert one.status == "RUNNING"
    assert one.network_interfaces[0].network_i_p.startswith("10.")
    everywhere = dict(
        client.instances.aggregated_list(
            compute_v1.AggregatedListInstancesRequest(project=PROJECT), **QUIET
        )
    )
    assert len(everywhere[f"zones/{ZONE}"].instances) == 2
    assert everywhere["zones/us-central1-c"].warning.code == "NO_RESULTS_ON_PAGE"


def test_a_wrong_size_fails_the_operation_without_a_status(client, clock):
    began = make_group(client, clock, size=4)
    done = operation(client, began)
    assert done.error.errors[0].message == (
        "Target size should be 2 for given accelerator topology but was 4."
    )
    assert not done.http_error_status_code
    with pytest.raises(exceptions.NotFound, match="instanceGroupManagers/g' was not found"):
        get_group(client)


def test_a_stock_out_shows_in_the_group_and_ends(api, client, clock):
    api.world.sell_out(ZONE, "v5p")
    make_group(client, clock)
    clock.advance(5)
    check = get_group(client).status.bulk_instance_operation
    assert check.in_progress
    (error,) = check.last_progress_check.error.errors
    assert error.code == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert error.error_details[0].error_info.metadatas["vmType"] == "ct5p-hightpu-4t"
    errors = list(
        client.groups.list_errors(project=PROJECT, zone=ZONE, instance_group_manager="g", **QUIET)
    )
    assert errors[0].error.code == error.code
    api.world.restock(ZONE, "v5p")
    clock.advance(61)
    assert topology_state(client) == "ACTIVE"


def test_machines_made_one_by_one_carry_their_own_errors(api, client, clock):
    api.world.sell_out(ZONE, "v5p")
    make_group(client, clock, mode="INDIVIDUAL")
    clock.advance(5)
    (error,) = managed(client)[0].last_attempt.errors.errors
    assert error.code == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"


def test_quota_is_counted_by_family_and_tried_again(client, clock):
    make_group(client, clock, "a", size=4, topology="2x2x4")
    insert_group(client, "b", size=4)
    clock.advance(3)
    (error,) = get_group(
        client, "b"
    ).status.bulk_instance_operation.last_progress_check.error.errors
    assert error.code == "QUOTA_EXCEEDED"
    assert error.message == "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 24.0 in region us-east5."
    info = error.error_details[0].quota_info
    assert (info.metric_name, dict(info.dimensions)) == (
        "compute.googleapis.com/tpus_per_tpu_family",
        {"region": "us-east5", "tpu_family": "CT5P"},
    )
    client.groups.delete_unary(project=PROJECT, zone=ZONE, instance_group_manager="a", **QUIET)
    clock.advance(80)
    assert topology_state(client, "b") == "ACTIVE"


def test_spot_machines_are_taken_and_never_come_back(api, client, clock):
    make_group(client, clock, machine="ct6e-standard-4t", topology="4x4", size=4, model="SPOT")
    clock.advance(90)
    assert api.cloud.preempt("g", worker=2)
    statuses = sorted(one.instance_status for one in managed(client))
    assert statuses == ["RUNNING", "RUNNING", "RUNNING", "STOPPING"]
    assert topology_state(client) == "INCOMPLETE"
    clock.advance(3600)
    assert "TERMINATED" in {one.instance_status for one in managed(client)}
    (event,) = client.zone_operations.list(
        compute_v1.ListZoneOperationsRequest(
            project=PROJECT, zone=ZONE, filter='operationType = "compute.instances.preempted"'
        ),
        **QUIET,
    )
    assert event.user == "system"
    assert event.status_message == "Instance was preempted."


def test_maintenance_is_announced_and_a_group_that_repairs_comes_back(api, client, clock):
    template(client, clock)
    asked = compute_v1.InstanceGroupManager(
        name="g",
        target_size=1,
        versions=[{"instance_template": f"projects/{PROJECT}/global/instanceTemplates/t"}],
    )
    client.groups.insert_unary(
        project=PROJECT, zone=ZONE, instance_group_manager_resource=asked, **QUIET
    )
    clock.advance(90)
    path = f"projects/{PROJECT}/zones/{ZONE}/instanceGroupManagers/g"
    assert api.world.announce_maintenance(path, in_s=600)
    (one,) = client.instances.list(project=PROJECT, zone=ZONE, **QUIET)
    coming = one.resource_status.upcoming_maintenance
    assert coming.maintenance_status == "PENDING"
    clock.advance(610)
    (one,) = client.instances.list(project=PROJECT, zone=ZONE, **QUIET)
    assert one.status == "STOPPING"
    clock.advance(200)
    (one,) = client.instances.list(project=PROJECT, zone=ZONE, **QUIET)
    assert one.status == "RUNNING"


def test_what_is_in_use_is_not_deleted(client, clock):
    make_group(client, clock)
    with pytest.raises(exceptions.BadRequest, match="already being used by"):
        client.templates.delete_unary(project=PROJECT, instance_template="t", **QUIET)
    with pytest.raises(exceptions.BadRequest, match="resource_policy resource"):
        client.policies.delete_unary(project=PROJECT, region=REGION, resource_policy="p", **QUIET)
    began = client.groups.delete_unary(
        project=PROJECT, zone=ZONE, instance_group_manager="g", **QUIET
    )
    assert operation(client, began).status == compute_v1.Operation.Status.RUNNING
    clock.advance(3)
    assert operation(client, began).status == compute_v1.Operation.Status.DONE
    client.templates.delete_unary(project=PROJECT, instance_template="t", **QUIET)
    client.policies.delete_unary(project=PROJECT, region=REGION, resource_policy="p", **QUIET)
    clock.advance(3)
    assert not list(client.templates.list(project=PROJECT, **QUIET))
    assert not list(client.policies.list(project=PROJECT, region=REGION, **QUIET))


def test_a_group_is_resized_to_nothing_and_back(client, clock):
    make_group(client, clock)
    clock.advance(90)
    how = {"project": PROJECT, "zone": ZONE, "instance_group_manager": "g", **QUIET}
    with pytest.raises(exceptions.BadRequest, match="only grow from target size 0"):
        client.groups.resize_unary(size=4, **how)
    client.groups.resize_unary(size=0, **how)
    clock.advance(3)
    assert not managed(client)
    client.groups.resize_unary(size=2, **how)
    clock.advance(90)
    assert topology_state(client) == "ACTIVE"


def test_the_same_request_is_carried_out_once_and_a_lost_reply_is_no_loss(api, client, clock):
    template(client, clock)
    policy(client, clock)
    api.faults.add(Fault(Mishap.LOST_REPLY, "instanceGroupManagers.insert"))
    request_id = str(uuid.uuid4())
    with pytest.raises(requests.ConnectionError):
        insert_group(client, request_id=request_id)
    first = insert_group(client, request_id=request_id)
    assert insert_group(client, request_id=request_id).name == first.name
    with pytest.raises(exceptions.Conflict, match="already exists"):
        insert_group(client, request_id=str(uuid.uuid4()))
    clock.advance(3)
    assert len(api.cloud.groups()) == 1


def test_parts_that_are_still_being_made_cannot_be_used(client, clock):
    template(client, clock)
    client.policies.insert_unary(
        project=PROJECT,
        region=REGION,
        resource_policy_resource=compute_v1.ResourcePolicy(
            name="p", workload_policy={"type_": "HIGH_THROUGHPUT"}
        ),
        **QUIET,
    )
    with pytest.raises(exceptions.BadRequest, match="is not ready"):
        insert_group(client)


def test_waiting_for_an_operation_may_end_early(client, clock):
    template(client, clock)
    began = client.templates.delete_unary(project=PROJECT, instance_template="t", **QUIET)
    waited = client.global_operations.wait(project=PROJECT, operation=began.name, **QUIET)
    assert waited.status == compute_v1.Operation.Status.RUNNING
    clock.advance(2)
    waited = client.global_operations.wait(project=PROJECT, operation=began.name, **QUIET)
    assert waited.status == compute_v1.Operation.Status.DONE


def test_wrong_requests_are_refused_in_the_api_s_words(client, clock):
    with pytest.raises(exceptions.BadRequest, match=r"'us-nope1-a'. Unknown zone."):
        client.groups.list(project=PROJECT, zone="us-nope1-a", **QUIET)
    with pytest.raises(exceptions.NotFound, match="The resource 'projects/other' was not found"):
        client.templates.list(project="other", **QUIET)
    with pytest.raises(exceptions.BadRequest, match="live migration"):
        template(client, clock, scheduling={"on_host_maintenance": "MIGRATE"})
    with pytest.raises(exceptions.BadRequest, match="FLEX_START needs a run duration"):
        template(client, clock, model="FLEX_START")
    with pytest.raises(exceptions.NotFound, match="instanceTemplates/t' was not found"):
        insert_group(client, with_policy=False)
    template(client, clock, machine="tpu7x-standard-4t")
    with pytest.raises(exceptions.NotFound, match="machineTypes/tpu7x-standard-4t"):
        insert_group(client, with_policy=False)


def test_bulk_mode_may_be_closed_to_spot(tmp_path, clock):
    world = World(ZONES, clock=clock, pace=PACE)
    api = ComputeAPI(tmp_path, world=world, bulk_models=("RESERVATION_BOUND", "FLEX_START"))
    client = Client(api)
    try:
        template(client, clock, machine="ct6e-standard-4t", model="SPOT")
        policy(client, clock, topology="4x4")
        with pytest.raises(exceptions.BadRequest, match="provisioning model SPOT"):
            insert_group(client, size=4)
        insert_group(client, size=4, mode="INDIVIDUAL")
        clock.advance(90)
        assert topology_state(client) == "ACTIVE"
    finally:
        api.close()


def test_reservations_hold_what_others_cannot_take(api, client, clock):
    api.world.sell_out(ZONE, "v5p")
    affinity = {
        "consume_reservation_type": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["ours"],
    }
    make_group(
        client,
        clock,
        model="RESERVATION_BOUND",
        template={"reservation_affinity": affinity},
    )
    clock.advance(90)
    assert topology_state(client) == "ACTIVE"


def test_machines_that_start_flexibly_end_after_their_time(client, clock):
    make_group(
        client,
        clock,
        model="FLEX_START",
        template={"scheduling": {"max_run_duration": {"seconds": 3600}}},
    )
    clock.advance(90)
    assert topology_state(client) == "ACTIVE"
    clock.advance(3700)
    assert {one.instance_status for one in managed(client)} == {"TERMINATED"}


def test_zones_regions_and_machine_types_are_listed(client):
    assert [one.name for one in client.zones.list(project=PROJECT, **QUIET)] == sorted(ZONES)
    offered = client.machine_types.list(project=PROJECT, zone="us-central1-c", **QUIET)
    assert [one.name for one in offered] == ["tpu7x-standard-1t", "tpu7x-standard-4t"]
    region = client.regions.get(project=PROJECT, region=REGION, **QUIET)
    metrics = {one.metric for one in region.quotas}
    assert "IN_USE_ADDRESSES" in metrics
    assert not any("TPU" in metric for metric in metrics)


def test_lists_come_in_pages(client, clock):
    for index in range(5):
        template(client, clock, f"t{index}")
    request = compute_v1.ListInstanceTemplatesRequest(project=PROJECT, max_results=2)
    pages = list(client.templates.list(request, **QUIET).pages)
    assert [len(page.items) for page in pages] == [2, 2, 1]


def test_a_signed_assertion_is_exchanged_for_a_token_that_expires(api):
    key_file = str(api.owner.key_file)
    credentials = service_account.Credentials.from_service_account_file(key_file, scopes=[SCOPE])
    credentials.refresh(Request())
    address = f"{api.endpoint}/compute/v1/projects/{PROJECT}/zones"
    headers = {"Authorization": f"Bearer {credentials.token}"}
    assert credentials.token.startswith("ya29.")
    assert len(requests.get(address, headers=headers, timeout=5).json()["items"]) == len(ZONES)
    api.desk.expire_all()
    reply = requests.get(address, headers=headers, timeout=5)
    assert reply.status_code == 401
    assert reply.json()["error"]["errors"][0]["reason"] == "authError"
    forged = requests.post(
        f"{api.endpoint}/token", data={"grant_type": "x", "assertion": "y"}, timeout=5
    )
    assert forged.json()["error"] == "unsupported_grant_type"


def test_who_may_not_is_refused(tmp_path, api):
    reader = api.accounts.add("reader", may=("compute.*.list", "compute.*.get"))
    client = Client(api, reader)
    assert not list(client.templates.list(project=PROJECT, **QUIET))
    with pytest.raises(exceptions.Forbidden, match=r"compute\.instanceGroupManagers\.create"):
        insert_group(client)
    stranger = ComputeAPI(tmp_path / "other", world=World(ZONES, clock=DrivenClock()))
    try:
        with pytest.raises(exceptions.Unauthorized):
            list(Client(api, stranger.owner).templates.list(project=PROJECT, **QUIET))
    finally:
        stranger.close()


def test_outages_and_slow_answers_pass(api, client):
    api.faults.add(Fault(Mishap.OUTAGE, "zones.*"))
    with pytest.raises(exceptions.ServiceUnavailable):
        client.zones.list(project=PROJECT, **QUIET)
    api.faults.add(Fault(Mishap.SLOW, "zones.*", pause_s=0.05))
    began = time.monotonic()
    client.zones.list(project=PROJECT, **QUIET)
    assert time.monotonic() - began >= 0.05
