"""What provider gce sends to Compute Engine, how it reads what comes back, and its errors."""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest
from emulated_tpus import PACE
from google.cloud import compute_v1

from tpukit.errors import ConfigError, PodUnavailable, ProviderError
from tpukit.job.sections import ChipLimit, LaunchSettings
from tpukit.pods import Store, TpuManager
from tpukit.pods.causes import Cause
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import PodState, Tier
from tpukit.pods.providers.gce import reading
from tpukit.pods.providers.gce.api import failure_of
from tpukit.pods.providers.gce.provider import ComputeEngineProvider
from tpukit.pods.providers.protocol import Command, Ended, Line
from tpukit.pods.providers.registry import open_provider
from tpukit_emulators.compute_api.rehearsal import ComputeEngineRehearsal
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.identity import NotAuthenticated
from tpukit_emulators.world import World

from .conftest import ZONES

HERE, THERE = "us-east5-a", "us-central1-c"
V5P = PodConfig(tpu_type="v5p-16", zones=(HERE,))
V6E = PodConfig(tpu_type="v6e-16", zones=(HERE,))
SEVEN = PodConfig(tpu_type="tpu7x-2x2x2", zones=(THERE,))
PROJECT = "projects/rehearsal"


def test_no_more_chips_are_asked_for_than_were_granted(cloud, launch, tmp_path):
    rows = (ChipLimit(zone="europe-west4-a", type="v6e", chips=16),)
    limited = launch.model_copy(update={"zone": None, "limits": rows})
    store = Store(tmp_path / "store")
    manager = TpuManager(provider="gce", launch=limited, state=store)
    config = PodConfig(tpu_type="v6e-16")
    assert manager.allocate_pod(config, name="one").zone == "europe-west4-a"
    with pytest.raises(PodUnavailable, match=r"16 are in use \(one-a1\)"):
        manager.allocate_pod(config, name="two")
    assert sum(held.amount for held in cloud.world.holdings()) == 16
    manager.release("one")
    store.close()


def body_of(cloud, path):
    """A resource as the server stored it."""
    return cloud.api.cloud.get(f"{PROJECT}/{path}").body


def template_of(cloud, name):
    return body_of(cloud, f"global/instanceTemplates/{name}")


def group_of(cloud, name, zone=HERE):
    return body_of(cloud, f"zones/{zone}/instanceGroupManagers/{name}")


def left_in(cloud):
    """Paths of everything that is there."""
    return cloud.api.cloud.everything() + [one.name for one in cloud.world.holdings()]


def until(provider, name, state, zone=HERE):
    deadline = time.monotonic() + 30
    while (pod := provider.get(name, zone=zone)).state is not state:
        assert time.monotonic() < deadline, pod
        time.sleep(0.01)
    return pod


@pytest.fixture
def sold_out(cloud):
    cloud.world.sell_out(HERE, "v5p")


class TestRequest:
    def test_everything_that_was_asked_for_reaches_the_api(self, cloud, launch):
        launch.service_account = "robot@rehearsal.iam.gserviceaccount.com"
        config = replace(
            V6E,
            tier=Tier.SPOT,
            network="my-vpc",
            software_version="ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
            labels={"owner": "me", "job": "j"},
        )
        ComputeEngineProvider(launch).create("all-a1", config)
        properties = template_of(cloud, "all-a1")["properties"]
        assert properties["machineType"] == "ct6e-standard-4t"
        disk = properties["disks"][0]["initializeParams"]
        assert disk["sourceImage"].endswith("family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e")
        assert disk["diskType"] == "hyperdisk-balanced"
        (interface,) = properties["networkInterfaces"]
        assert interface["network"] == "global/networks/my-vpc"
        assert interface["accessConfigs"][0]["type"] == "ONE_TO_ONE_NAT"
        assert properties["scheduling"] == {
            "provisioningModel": "SPOT",
            "instanceTerminationAction": "STOP",
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
        }
        (account,) = properties["serviceAccounts"]
        assert account["email"] == "robot@rehearsal.iam.gserviceaccount.com"
        assert properties["labels"] == {"owner": "me", "job": "j", "tpukit-pod": "all-a1"}
        facts = {item["key"]: item["value"] for item in properties["metadata"]["items"]}
        assert facts["ssh-keys"].startswith("tpukit:ssh-ed25519 ")
        policy = body_of(cloud, "regions/us-east5/resourcePolicies/all-a1")["workloadPolicy"]
        assert policy == {
            "type": "HIGH_THROUGHPUT",
            "acceleratorTopology": "4x4",
            "acceleratorTopologyMode": "AUTO_CONNECT",
        }
        group = group_of(cloud, "all-a1-s0")
        assert group["targetSize"] == 4
        assert group["targetSizePolicy"] == {"mode": "BULK"}
        assert group["instanceLifecyclePolicy"] == {"defaultActionOnFailure": "DO_NOTHING"}
        assert group["resourcePolicies"]["workloadPolicy"].endswith("resourcePolicies/all-a1")

    def test_a_reservation_is_named(self, cloud, provider):
        provider.create("res-a1", replace(V5P, tier=Tier.RESERVED, reservation="ours"))
        properties = template_of(cloud, "res-a1")["properties"]
        assert properties["scheduling"]["provisioningModel"] == "RESERVATION_BOUND"
        assert properties["reservationAffinity"] == {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": ["ours"],
        }
        assert until(provider, "res-a1", PodState.READY).tier is Tier.RESERVED
        left = left_in(cloud)
        with pytest.raises(ConfigError, match="theirs"):
            provider.create("res-a2", replace(V5P, tier=Tier.RESERVED, reservation="theirs"))
        assert left_in(cloud) == left

    def test_machines_may_start_flexibly(self, cloud, launch):
        launch.flex_start_seconds = 1.0
        provider = ComputeEngineProvider(launch)
        provider.create("flex-a1", SEVEN)
        assert template_of(cloud, "flex-a1")["properties"]["scheduling"] == {
            "provisioningModel": "FLEX_START",
            "instanceTerminationAction": "DELETE",
            "maxRunDuration": {"seconds": "1"},
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
        }
        until(provider, "flex-a1", PodState.READY, THERE)
        assert until(provider, "flex-a1", PodState.SUSPENDED, THERE).cause is Cause.NODE_GONE
        with pytest.raises(ConfigError, match="exclude each other"):
            provider.create("flex-a2", replace(SEVEN, tier=Tier.SPOT))
        launch.flex_start_seconds = 1e6
        with pytest.raises(ConfigError, match="7 days"):
            ComputeEngineProvider(launch).create("flex-a2", SEVEN)

    def test_a_slice_of_one_host_needs_no_policy(self, cloud, provider):
        provider.create("one-a1", replace(V5P, tpu_type="v5p-8"))
        assert "resourcePolicies" not in group_of(cloud, "one-a1-s0")
        pod = until(provider, "one-a1", PodState.READY)
        assert len(pod.hosts) == 1
        assert not any("resourcePolicies/one" in path for path in left_in(cloud))
        provider.delete("one-a1", zone=HERE)
        assert left_in(cloud) == []

    def test_several_slices_are_several_groups_with_one_policy(self, cloud, provider):
        provider.create("two-a1", replace(V5P, tpu_type="2xv5p-16"))
        pod = until(provider, "two-a1", PodState.READY)
        assert [(one.slice_index, one.worker_id) for one in pod.hosts] == [
            *((0, 0), (0, 1)),
            *((1, 0), (1, 1)),
        ]
        assert len([path for path in left_in(cloud) if "resourcePolicies" in path]) == 1

    @pytest.mark.parametrize("older", ["v2-32", "v3-32", "v4-16", "v5e-16"])
    def test_older_generations_are_refused_with_the_way_out(self, cloud, provider, older):
        with pytest.raises(ConfigError, match=r"v5p, v6e and TPU7x.*provider gcp or gke"):
            provider.create("old-a1", replace(V5P, tpu_type=older))
        assert left_in(cloud) == []
        assert older.split("-")[0] in provider.capabilities.refused

    def test_what_cannot_be_is_said_before_anything_is_made(self, cloud, provider):
        for config, said in (
            (replace(V5P, enable_ip_alias=False), "enable_ip_alias"),
            (replace(V5P, software_version="v2-alpha-tpuv5"), "image of the Cloud TPU API"),
            (replace(V5P, labels={"owner": "A B"}), "Try 'a-b'"),
            (replace(V5P, zones=("us-east5-x",)), "Did you mean 'us-east5-a'"),
        ):
            with pytest.raises(ConfigError, match=said):
                provider.create("bad-a1", config)
        with pytest.raises(PodUnavailable, match="no machines tpu7x-standard-4t") as refused:
            provider.create("bad-a1", replace(SEVEN, zones=(HERE,)))
        assert refused.value.cause == Cause.UNPLACEABLE  # another zone may have them
        assert left_in(cloud) == []

    def test_machines_come_one_by_one_where_bulk_mode_is_not_offered(self, tmp_path, state):
        models = ("RESERVATION_BOUND", "FLEX_START")
        world = World(ZONES, pace=PACE)
        with ComputeEngineRehearsal(tmp_path / "c", world=world, bulk_models=models) as cloud:
            provider = ComputeEngineProvider(LaunchSettings(**cloud.settings))
            provider.create("single-a1", replace(V6E, tier=Tier.SPOT))
            assert group_of(cloud, "single-a1-s0")["targetSizePolicy"] == {"mode": "INDIVIDUAL"}
            until(provider, "single-a1", PodState.READY)

    def test_a_template_of_someone_else_is_left_alone(self, cloud, provider):
        stranger = compute_v1.InstanceTemplate(
            name="taken-a1",
            properties={
                "machine_type": "e2-small",
                "disks": [{"boot": True}],
                "network_interfaces": [{"network": "global/networks/default"}],
                "scheduling": {"on_host_maintenance": "TERMINATE"},
            },
        )
        api = provider._api
        request = compute_v1.InsertInstanceTemplateRequest(instance_template_resource=stranger)
        api.finish(api.begin(api.templates.insert_unary, request))
        with pytest.raises(ProviderError, match="does not belong to a pod"):
            provider.create("taken-a1", V5P)
        with pytest.raises(ProviderError, match="does not belong to a pod"):
            provider.delete("taken-a1", zone=HERE)
        assert provider.list() == []
        assert left_in(cloud) == [f"{PROJECT}/global/instanceTemplates/taken-a1"]

    def test_a_name_is_taken_in_all_zones(self, provider):
        provider.create("once-a1", V5P)
        with pytest.raises(ConfigError, match=f"already exists in {HERE}"):
            provider.create("once-a1", SEVEN)
        assert provider.get("once-a1", zone=THERE) is None


class TestStates:
    def test_hosts_are_in_the_order_of_workers_not_of_names(self, cloud, provider):
        provider.create("order-a1", replace(V5P, tpu_type="v5p-64"))
        pod = until(provider, "order-a1", PodState.READY)
        (group,) = cloud.api.cloud.groups()
        expected = [one.name for one in sorted(group.instances, key=lambda one: one.worker)]
        assert [host.name for host in pod.hosts] == expected
        assert expected != sorted(expected)
        assert all(host.address.startswith("127.") for host in pod.hosts)

    def test_a_stock_out_is_waited_for(self, cloud, provider, sold_out):
        pod = provider.create("stock-a1", V5P)
        pod = until(provider, "stock-a1", PodState.WAITING)
        while not pod.reason.startswith("The zone"):
            pod = provider.get("stock-a1", zone=HERE)
        assert "does not have enough resources" in pod.reason
        assert pod.cause is Cause.STOCKOUT
        cloud.world.restock(HERE, "v5p")
        until(provider, "stock-a1", PodState.READY)

    def test_quota_is_an_error_and_nothing_is_left(self, cloud, provider):
        provider.create("fits-a1", replace(V5P, tpu_type="v5p-32"))
        left = left_in(cloud)
        with pytest.raises(PodUnavailable, match=r"TPUS_PER_TPU_FAMILY.*Limit: 32") as error:
            provider.create("over-a1", replace(V5P, tpu_type="v5p-64"))
        assert error.value.cause == Cause.QUOTA.value
        assert left_in(cloud) == left

    def test_spot_machines_that_are_taken_lose_the_pod(self, cloud, provider):
        provider.create("spot-a1", replace(V6E, tier=Tier.SPOT))
        until(provider, "spot-a1", PodState.READY)
        cloud.api.cloud.preempt("spot-a1", worker=2, notice_s=0.01)
        pod = until(provider, "spot-a1", PodState.SUSPENDED)
        assert pod.cause is Cause.SPOT
        assert "STOPPING" in pod.reason or "TERMINATED" in pod.reason
        assert [one.state for one in provider.list()] == [PodState.SUSPENDED]

    def test_maintenance_is_announced_and_told_from_preemption(self, cloud, provider):
        provider.create("maint-a1", V5P)
        until(provider, "maint-a1", PodState.READY)
        path = cloud.api.cloud.full_name("maint-a1")
        cloud.world.announce_maintenance(path, in_s=0.3)
        assert "maintenance from" in provider.get("maint-a1", zone=HERE).reason
        pod = until(provider, "maint-a1", PodState.SUSPENDED)
        assert pod.cause is Cause.MAINTENANCE

    def test_a_host_error_is_not_a_preemption(self, cloud, provider):
        provider.create("host-a1", V5P)
        until(provider, "host-a1", PodState.READY)
        cloud.world.preempt(cloud.api.cloud.full_name("host-a1"), notice_s=0, reason="host error")
        assert until(provider, "host-a1", PodState.SUSPENDED).cause is Cause.NODE_GONE

    def test_machines_that_can_never_be_made_fail_the_pod(self, cloud, provider, sold_out):
        provider.create("never-a1", V5P)
        cloud.world.fail_start(cloud.api.cloud.full_name("never-a1"), "no such image")
        pod = until(provider, "never-a1", PodState.FAILED)
        assert "no such image" in pod.reason

    def test_a_half_made_pod_is_found_by_its_owner_and_deleted(self, cloud, provider, monkeypatch):
        cloud.api.faults.add(Fault(Mishap.OUTAGE, "instanceGroupManagers.*", times=None))
        with pytest.raises(ProviderError, match="does not answer"):
            provider.create("half-a1", V5P.with_labels(owner="me"))
        cloud.api.faults.clear()
        assert len(left_in(cloud)) == 2
        (pod,) = provider.list(owner="me")
        assert (pod.name, pod.state) == ("half-a1", PodState.WAITING)
        monkeypatch.setattr(reading, "MAKING_S", 0.0)
        (pod,) = provider.list(owner="me")
        assert pod.state is PodState.FAILED
        provider.delete("half-a1", zone=HERE)
        assert left_in(cloud) == []

    def test_a_half_made_pod_is_made_whole_by_asking_again(self, cloud, provider):
        outage = Fault(Mishap.OUTAGE, "instanceGroupManagers.*", times=None)
        cloud.api.faults.add(outage)
        with pytest.raises(ProviderError):
            provider.create("whole-a1", V5P)
        cloud.api.faults.clear()
        provider.create("whole-a1", V5P)
        until(provider, "whole-a1", PodState.READY)


class TestLostReplies:
    @pytest.mark.parametrize(
        "call", ["instanceTemplates.*", "resourcePolicies.*", "instanceGroupManagers.*"]
    )
    def test_any_reply_may_be_lost(self, cloud, provider, call):
        cloud.api.faults.add(Fault(Mishap.LOST_REPLY, call, times=2))
        provider.create("lost-a1", V5P)
        until(provider, "lost-a1", PodState.READY)
        assert len(cloud.world.holdings()) == 1
        cloud.api.faults.add(Fault(Mishap.LOST_REPLY, call, times=2))
        provider.delete("lost-a1", zone=HERE)
        assert left_in(cloud) == []

    def test_an_operation_may_fail_in_two_ways(self):
        errors = compute_v1.Error(errors=[{"code": "INVALID_USAGE", "message": "Wrong size."}])
        assert "Wrong size" in str(failure_of(compute_v1.Operation(error=errors)))
        status = compute_v1.Operation(http_error_status_code=503, http_error_message="NO")
        assert isinstance(failure_of(status), ProviderError)
        code = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
        dry = compute_v1.Error(errors=[{"code": code, "message": "None left."}])
        failure = failure_of(compute_v1.Operation(error=dry, http_error_status_code=503))
        assert isinstance(failure, PodUnavailable)
        assert failure.cause == Cause.STOCKOUT.value
        assert failure_of(compute_v1.Operation()) is None


class TestErrors:
    """Each with a way out, nothing made."""

    @pytest.fixture(autouse=True)
    def _nothing_made(self, cloud):
        yield
        assert left_in(cloud) == []

    def test_a_key_of_someone_else(self, tmp_path, cloud, launch):
        world = World(ZONES, pace=PACE)
        with ComputeEngineRehearsal(tmp_path / "o", world=world, control_port=None) as other:
            launch.credentials_file = str(other.api.owner.key_file)
            with pytest.raises(ProviderError, match="does not accept the credentials"):
                ComputeEngineProvider(launch).create("no-a1", V5P)

    def test_a_token_that_expired(self, cloud, provider, monkeypatch):
        def expired(authorization):
            raise NotAuthenticated("expired")

        monkeypatch.setattr(cloud.api.desk, "verify", expired)
        with pytest.raises(ProviderError, match="wrong or expired"):
            provider.create("no-a1", V5P)

    def test_an_account_that_may_not(self, cloud, launch):
        reader = cloud.api.accounts.add("reader", may=("compute.*.get", "compute.*.list"))
        launch.credentials_file = str(reader.key_file)
        with pytest.raises(ProviderError, match=r"compute\.instanceTemplates\.create.*role"):
            ComputeEngineProvider(launch).create("no-a1", V5P)

    def test_no_credentials(self, tmp_path, launch, monkeypatch):
        launch.credentials_file = None
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        with pytest.raises(ProviderError, match="no Google Cloud credentials"):
            ComputeEngineProvider(launch).create("no-a1", V5P)

    def test_a_broken_key_file_is_not_quoted(self, tmp_path, launch):
        launch.credentials_file = str(tmp_path / "k.json")
        (tmp_path / "k.json").write_text(json.dumps({"type": "service_account", "x": "s3cret"}))
        with pytest.raises(ProviderError) as error:
            ComputeEngineProvider(launch).create("no-a1", V5P)
        assert "s3cret" not in str(error.value)

    def test_nobody_listens(self, launch):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        launch.endpoint = f"http://127.0.0.1:{port}"
        with pytest.raises(ProviderError, match=r"does not answer .*check the network"):
            ComputeEngineProvider(launch).create("no-a1", V5P)

    def test_nobody_answers(self, launch):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            launch.endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(ProviderError, match="it took too long"):
                ComputeEngineProvider(launch).create("no-a1", V5P)

    def test_an_outage_that_lasts(self, cloud, provider):
        cloud.api.faults.add(Fault(Mishap.OUTAGE, times=None))
        with pytest.raises(ProviderError, match="Backend Error"):
            provider.create("no-a1", V5P)
        cloud.api.faults.clear()

    def test_another_project(self, launch):
        launch.project = "other"
        with pytest.raises((ConfigError, ProviderError), match="other"):
            ComputeEngineProvider(launch).list()


class TestGang:
    pytestmark = pytest.mark.xdist_group("pods-processes")

    def test_processes_of_several_slices_know_their_slice(self, provider):
        provider.create("mega-a1", replace(V5P, tpu_type="2xv5p-16"))
        pod = until(provider, "mega-a1", PodState.READY)
        program = (
            "import os; e = os.environ; print(e['TPUKIT_HOST_ID'], e['MEGASCALE_SLICE_ID'],"
            " e['MEGASCALE_NUM_SLICES'], e['MEGASCALE_COORDINATOR_ADDRESS'].split(':')[0])"
        )
        gang = provider.start(pod, Command(argv=("python3", "-c", program)), attempt=1)
        events = []
        while not any(isinstance(event, Ended) for event in events):
            events += gang.wait(0.2)
        gang.close()
        first = pod.hosts[0].internal_address
        lines = sorted(event.text for event in events if isinstance(event, Line))
        assert lines == [f"{rank} {rank // 2} 2 {first}" for rank in range(4)]

    def test_nothing_runs_on_a_pod_that_is_not_ready(self, cloud, provider, sold_out):
        pod = provider.create("not-a1", V5P)
        with pytest.raises(ProviderError, match="nothing can run"):
            provider.start(pod, Command(argv=("true",)), attempt=1)


class TestWhole:
    def test_it_is_opened_by_name(self, launch):
        assert open_provider("gce", launch).name == "gce"

    def test_nobody_but_the_endpoint_is_asked(self, provider, asked_names):
        provider.create("own-a1", V5P)
        until(provider, "own-a1", PodState.READY)
        provider.delete("own-a1", zone=HERE)
        assert asked_names == {"127.0.0.1"}

    def test_preflight_says_what_is_there_and_what_is_not(self, provider):
        found = {one.id: one for one in provider.preflight(V5P)}
        assert {one.severity for one in found.values()} <= {"ok", "info"}
        assert "2 × ct5p-hightpu-4t" in found["gce-machine-type"].seen
        assert "TPUS_PER_TPU_FAMILY" in found["gce-quota"].seen
        found = {one.id: one for one in provider.preflight(replace(SEVEN, zones=(HERE,)))}
        assert found["gce-machine-type"].severity == "error"
        held = replace(V5P, tier=Tier.RESERVED, reservation="our")
        found = {one.id: one for one in provider.preflight(held)}
        assert "Did you mean 'ours'" in found["gce-reservation"].fix
        (refused,) = provider.preflight(replace(V5P, tpu_type="v4-16"))
        assert refused.severity == "error"

    def test_preflight_names_lost_pods_that_hold_quota(self, cloud, provider):
        provider.create("lost-a1", replace(V6E, tier=Tier.SPOT))
        until(provider, "lost-a1", PodState.READY)
        cloud.api.cloud.preempt("lost-a1", notice_s=0)
        until(provider, "lost-a1", PodState.SUSPENDED)
        quota = next(one for one in provider.preflight(V6E) if one.id == "gce-quota")
        assert quota.severity == "warning"
        assert "lost-a1" in quota.seen

    def test_many_at_once_make_one_pod_each(self, cloud, provider):
        names = [f"many{index}-a1" for index in range(8)]
        config = replace(V6E, tpu_type="v6e-8")
        threads = [
            threading.Thread(target=provider.create, args=(name, config))
            for name in (*names, *names)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in names:
            until(provider, name, PodState.READY)
        assert sorted(pod.name for pod in provider.list()) == names
        assert len(cloud.world.holdings()) == 8
