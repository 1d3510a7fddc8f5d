"""What provider gcp sends to Cloud TPU, how it reads what comes back, and its errors."""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest
from google.auth import jwt
from google.cloud import tpu_v2

from tpukit.errors import ConfigError, PodUnavailable, ProviderError, ProviderSilent
from tpukit.job.sections import ChipLimit
from tpukit.pods import Store, TpuManager
from tpukit.pods.causes import Cause
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import PodState, Tier
from tpukit.pods.providers.gcp.provider import CloudTPUProvider
from tpukit.pods.providers.gcp.reading import cause_of_failure
from tpukit.pods.providers.gcp.request import runtime_version
from tpukit.pods.providers.protocol import Command
from tpukit.pods.providers.ssh.transport import own_key
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.zone_search import NoPod, ZoneSearch
from tpukit.runtime import google_credentials as credentials_module
from tpukit.runtime.google_credentials import Identity, find_identity
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.holding import Stage

V6E = PodConfig(tpu_type="v6e-8", zones=("us-east5-b",))
HERE = "projects/rehearsal/locations/us-east5-b"


def asked_for(cloud, name):
    """The request as the server stored it."""
    stored = cloud.api.cloud.get(cloud.api.cloud.full_name(name))[0]
    return tpu_v2.QueuedResource.wrap(stored.asked)


def until(provider, name, state, zone="us-east5-b"):
    deadline = time.monotonic() + 30
    while (pod := provider.get(name, zone=zone)).state is not state:
        assert time.monotonic() < deadline, pod
        time.sleep(0.01)
    return pod


class TestRequest:
    def test_everything_that_was_asked_for_reaches_the_api(self, cloud, provider):
        config = replace(
            V6E,
            tier=Tier.SPOT,
            network="my-vpc",
            software_version="tpu-ubuntu2204-base",
            queue_timeout_s=90.5,
            labels={"owner": "me", "job": "j"},
        )
        provider.create("all-a1", config)
        asked = asked_for(cloud, "all-a1")
        spec = asked.tpu.node_spec[0]
        assert "spot" in asked
        assert asked.queueing_policy.valid_until_duration.seconds == 91
        assert (spec.parent, spec.node_id) == (HERE, "all-a1")
        assert spec.node.accelerator_type == "v6e-8"
        assert spec.node.runtime_version == "tpu-ubuntu2204-base"
        assert spec.node.network_config.network == "my-vpc"
        assert spec.node.network_config.enable_external_ips
        assert spec.node.scheduling_config.spot
        assert dict(spec.node.labels) == {"owner": "me", "job": "j"}
        assert spec.node.metadata["ssh-keys"].startswith("tpukit:ssh-ed25519 ")

    def test_the_file_of_document_004_reaches_the_api(self, cloud, launch):
        written = {
            "zone": "us-central1-a",
            "network": "default",
            "software_version": "2.8.0",
            "enable_ip_alias": True,
            "reserved": False,
        }
        launch = launch.model_copy(update=written)
        provider = CloudTPUProvider(launch)
        provider.create("doc-a1", PodConfig.of(launch, "v3-8"))
        node = asked_for(cloud, "doc-a1").tpu.node_spec[0].node
        assert (node.accelerator_type, node.runtime_version) == ("v3-8", "tpu-vm-tf-2.8.0")
        assert node.network_config.network == "default"
        assert not node.scheduling_config.reserved
        until(provider, "doc-a1", PodState.READY, "us-central1-a")

    def test_a_reservation_is_named(self, cloud, provider):
        provider.create("res-a1", replace(V6E, tier=Tier.RESERVED, reservation="ours"))
        asked = asked_for(cloud, "res-a1")
        assert asked.reservation_name == f"{HERE}/reservations/ours"
        assert "guaranteed" in asked
        assert asked.tpu.node_spec[0].node.scheduling_config.reserved
        assert until(provider, "res-a1", PodState.READY).tier is Tier.RESERVED
        with pytest.raises(ConfigError, match="theirs"):
            provider.create("res-a2", replace(V6E, tier=Tier.RESERVED, reservation="theirs"))

    def test_an_unusual_shape_is_asked_for_by_topology(self, cloud, provider):
        config = PodConfig(tpu_type="v5p:4x4x16", zones=("us-central1-a",))
        assert provider.create("shape-a1", config).slice == config.slice
        node = asked_for(cloud, "shape-a1").tpu.node_spec[0].node
        assert not node.accelerator_type
        assert (node.accelerator_config.type_.name, node.accelerator_config.topology) == (
            "V5P",
            "4x4x16",
        )

    def test_slices_are_one_request(self, cloud, provider):
        provider.create("multi-a1", replace(V6E, tpu_type="2xv6e-16"))
        params = asked_for(cloud, "multi-a1").tpu.node_spec[0].multislice_params
        assert (params.node_count, params.node_id_prefix) == (2, "multi-a1")
        pod = until(provider, "multi-a1", PodState.READY)
        assert [(host.slice_index, host.worker_id) for host in pod.hosts] == [
            (slice_index, worker) for slice_index in range(2) for worker in range(4)
        ]

    def test_hosts_may_do_without_external_addresses(self, cloud, launch):
        provider = CloudTPUProvider(launch.model_copy(update={"external_addresses": False}))
        provider.create("inside-a1", V6E)
        node = asked_for(cloud, "inside-a1").tpu.node_spec[0].node
        assert not node.network_config.enable_external_ips
        pod = until(provider, "inside-a1", PodState.READY)
        assert pod.hosts[0].address == pod.hosts[0].internal_address

    def test_the_next_zone_is_asked_where_one_does_not_offer_the_slice(self, cloud, provider):
        with pytest.raises(PodUnavailable, match="was not found in zone us-central1-a") as refused:
            provider.create("far-a1", V6E.in_zone("us-central1-a"))
        assert refused.value.cause == Cause.UNPLACEABLE
        offering = [name for name, zone in cloud.world.zones.items() if "v6e" in zone.capacity]
        assert str(refused.value).endswith(f"It is in {', '.join(sorted(offering))}.")
        assert not cloud.world.holdings()
        search = ZoneSearch(provider, Policy(), tell=lambda event: None, stopping=threading.Event())
        asked = []
        both = V6E.in_zone("us-central1-a", "us-east5-b")
        pod = search.get("far-a1", both, command=Command(argv=("true",)), asking=asked.append)
        assert (pod.zone, asked) == ("us-east5-b", ["us-central1-a", "us-east5-b"])
        with pytest.raises(NoPod, match="was not found in zone europe-west4-b"):
            search.get(
                "none-a1",
                V6E.in_zone("europe-west4-b"),
                command=Command(argv=("true",)),
                asking=asked.append,
            )

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (replace(V6E, tpu_type="tpu7x-2x2x1"), "gke or gce"),
            (replace(V6E, enable_ip_alias=False), "always have addresses of the VPC"),
            (replace(V6E, labels={"owner": "Me@Home"}), "me-home"),
            (replace(V6E, zones=()), "launch.zone"),
        ],
    )
    def test_what_the_api_cannot_give_is_refused_before_asking(self, cloud, launch, config, reason):
        provider = CloudTPUProvider(launch.model_copy(update={"zone": None}))
        before = cloud.api.calls
        with pytest.raises(ConfigError, match=reason):
            provider.create("never-a1", config)
        assert cloud.api.calls == before

    @pytest.mark.parametrize(
        ("tpu_type", "software", "image"),
        [
            ("v4-8", None, "tpu-ubuntu2204-base"),
            ("v5litepod-16", None, "v2-alpha-tpuv5-lite"),
            ("v5p-8", None, "v2-alpha-tpuv5"),
            ("v6e-8", None, "v2-alpha-tpuv6e"),
            ("v3-8", "2.8.0", "tpu-vm-tf-2.8.0"),
            ("v3-32", "2.8.0", "tpu-vm-tf-2.8.0-pod"),
            ("v6e-8", "tpu-ubuntu2204-base", "tpu-ubuntu2204-base"),
        ],
    )
    def test_images(self, tpu_type, software, image):
        assert runtime_version(PodConfig(tpu_type=tpu_type).slice, software) == image


class TestLife:
    def test_a_new_pod_costs_one_call(self, cloud, provider):
        before = cloud.api.calls
        assert provider.create("one-a1", V6E).state is PodState.WAITING
        assert cloud.api.calls == before + 1

    def test_one_call_shows_the_maintenance_of_a_zone(self, cloud, provider, monkeypatch):
        names = [f"told-a{number}" for number in range(1, 5)]
        for name in names:
            provider.create(name, V6E)
        while any(held.stage is not Stage.RUNNING for held in cloud.world.holdings()):
            time.sleep(0.01)
        cloud.world.announce_maintenance(f"{HERE}/queuedResources/told-a3", in_s=600)
        before = cloud.api.calls
        for name in names:
            told = "maintenance from" in provider.get(name, zone="us-east5-b").reason
            assert told == (name == "told-a3")
        assert cloud.api.calls == before + 2 * len(names) + 1, "and one list of the zone"
        told = [pod.name for pod in provider.list() if "maintenance from" in pod.reason]
        assert told == ["told-a3"]
        assert cloud.api.calls == before + 2 * len(names) + 3
        cloud.world.announce_maintenance(f"{HERE}/queuedResources/told-a2", in_s=600)
        monkeypatch.setattr("tpukit.pods.providers.gcp.provider.INTERVAL_S", 0.0)
        told = [pod.name for pod in provider.list() if "maintenance from" in pod.reason]
        assert told == ["told-a2", "told-a3"]

    def test_pods_are_seen_where_their_maintenance_is_not(self, cloud, provider):
        provider.create("blind-a1", V6E)
        until(provider, "blind-a1", PodState.READY)
        provider.create("blind-a2", V6E)
        time.sleep(0.2)
        cloud.api.faults.add(Fault(Mishap.OUTAGE, "ListNodes", times=None))
        assert until(provider, "blind-a2", PodState.READY).reason == ""

    def test_a_preempted_pod_says_so(self, cloud, provider):
        provider.create("spot-a1", V6E.with_preemptible())
        until(provider, "spot-a1", PodState.READY)
        cloud.api.cloud.preempt("spot-a1", notice_s=0)
        lost = until(provider, "spot-a1", PodState.SUSPENDED)
        assert lost.cause is Cause.SPOT

    def test_maintenance_is_seen_before_and_after(self, cloud, provider):
        provider.create("maint-a1", V6E)
        name = f"{HERE}/queuedResources/maint-a1"
        deadline = time.monotonic() + 30
        while not cloud.world.announce_maintenance(name, in_s=1.5):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "maintenance from" in until(provider, "maint-a1", PodState.READY).reason
        lost = until(provider, "maint-a1", PodState.SUSPENDED)
        while lost.cause is not Cause.MAINTENANCE:
            assert time.monotonic() < deadline, lost
            lost = provider.get("maint-a1", zone="us-east5-b")

    def test_one_slice_lost_is_a_pod_lost(self, cloud, provider):
        provider.create("multi-a1", replace(V6E, tpu_type="2xv6e-16"))
        until(provider, "multi-a1", PodState.READY)
        cloud.api.cloud.preempt("multi-a1", node=0, notice_s=0)
        assert until(provider, "multi-a1", PodState.SUSPENDED).hosts == ()

    def test_waiting_ends(self, cloud, provider):
        cloud.world.sell_out("us-east5-b", "v6e")
        assert provider.create("wait-a1", replace(V6E, queue_timeout_s=1)).state is PodState.WAITING
        failed = until(provider, "wait-a1", PodState.FAILED)
        assert failed.cause is Cause.WAITED_TOO_LONG

    def test_all_zones_are_listed(self, provider):
        provider.create("here-a1", V6E)
        provider.create("there-a1", PodConfig(tpu_type="v3-8", zones=("us-central1-a",)))
        assert {pod.zone for pod in provider.list()} == {"us-east5-b", "us-central1-a"}

    def test_zones_are_listed_one_by_one_where_all_at_once_is_refused(self, provider, monkeypatch):
        provider.create("here-a1", V6E)
        provider.create("there-a1", PodConfig(tpu_type="v3-8", zones=("us-central1-a",)))
        until(provider, "here-a1", PodState.READY)
        listed, real = [], provider._api.list_queued

        def list_queued(zone):
            listed.append(zone)
            if zone == "-":
                raise ConfigError("Invalid parent 'projects/rehearsal/locations/-'")
            return real(zone)

        monkeypatch.setattr(provider._api, "list_queued", list_queued)
        for _ in range(2):
            pods = {pod.name: pod for pod in provider.list()}
            assert set(pods) == {"here-a1", "there-a1"}
            assert pods["here-a1"].hosts
        assert listed.count("-") == 1


class TestErrors:
    def test_quota(self, cloud, provider):
        with pytest.raises(PodUnavailable, match="Limit: 64") as refused:
            provider.create("much-a1", replace(V6E, tpu_type="v6e-128").with_preemptible())
        assert refused.value.cause == Cause.QUOTA
        assert not cloud.world.holdings()

    def test_a_zone_that_is_not_offered_is_passed_over(self, cloud, launch, state):
        """As those of the price catalogue are, where a project may use some of them only."""
        manager = TpuManager(launch=launch, state=Store(state)).build()
        pod = manager.allocate_pod(V6E.in_zone("asia-northeast1-b", "us-east5-b"))
        assert pod.zone == "us-east5-b"
        manager.release(pod)
        with pytest.raises(ConfigError, match=r"has no zone 'us-east5-bb'.*Did you mean"):
            manager.allocate_pod(V6E.in_zone("us-east5-bb"), wait_s=60)  # waiting does not help
        much = replace(V6E, tpu_type="v6e-128", zones=("us-east5-b", "asia-northeast1-b"))
        with pytest.raises(PodUnavailable, match="Limit: 64") as refused:  # the one that may change
            manager.allocate_pod(much.with_preemptible())
        assert refused.value.cause == Cause.QUOTA
        assert not cloud.world.holdings()

    def test_a_zone_that_is_nearly_right(self, cloud, provider):
        with pytest.raises(ConfigError, match="Did you mean 'us-east5-b'"):
            provider.create("zone-a1", V6E.in_zone("us-east5-bb"))

    def test_wrong_credentials(self, cloud, launch, tmp_path):
        key = json.loads(cloud.api.owner.key_file.read_text())
        other = cloud.api.accounts.add("fired")
        stolen = json.loads(other.key_file.read_text())
        wrong = tmp_path / "wrong.json"
        wrong.write_text(json.dumps({**key, "private_key": stolen["private_key"]}))
        provider = CloudTPUProvider(launch.model_copy(update={"credentials_file": str(wrong)}))
        with pytest.raises(ProviderError, match="does not accept the credentials") as refused:
            provider.create("wrong-a1", V6E)
        assert "PRIVATE" not in str(refused.value)
        assert not cloud.world.holdings()

    def test_an_expired_token(self, cloud, provider):
        expired = jwt.Credentials.from_service_account_file(
            str(cloud.api.owner.key_file),
            audience="https://tpu.googleapis.com/",
            token_lifetime=-3600,
        )
        provider._api.identity = Identity(expired, "an old token", "rehearsal")
        with pytest.raises(ProviderError, match="wrong or expired"):
            provider.create("late-a1", V6E)
        assert not cloud.world.holdings()

    def test_too_few_permissions(self, cloud, launch):
        reader = cloud.api.accounts.add("reader", may=("tpu.*.list", "tpu.*.get"))
        update = {"credentials_file": str(reader.key_file)}
        provider = CloudTPUProvider(launch.model_copy(update=update))
        with pytest.raises(ProviderError, match=r"roles/tpu\.admin"):
            provider.create("weak-a1", V6E)
        assert not cloud.world.holdings()

    def test_nobody_there(self, cloud, launch):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        update = {"endpoint": f"localhost:{port}"}
        provider = CloudTPUProvider(launch.model_copy(update=update))
        with pytest.raises(ProviderError, match="does not answer"):
            provider.create("nobody-a1", V6E)

    def test_somebody_who_never_answers(self, cloud, launch):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"localhost:{silent.getsockname()[1]}"
            update = {"endpoint": endpoint, "request_timeout_seconds": 0.5}
            provider = CloudTPUProvider(launch.model_copy(update=update))
            with pytest.raises(ProviderSilent, match="does not answer"):
                provider.get("silent-a1", zone="us-east5-b")

    def test_an_outage_that_ends_is_not_seen(self, cloud, provider):
        cloud.api.faults.add(Fault(Mishap.OUTAGE, "*", times=2))
        assert provider.create("out-a1", V6E).name == "out-a1"

    def test_no_credentials_anywhere(self, monkeypatch, tmp_path):
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.setattr(credentials_module, "_FIRMWARE", tmp_path / "none")
        with pytest.raises(ProviderError, match="gcloud auth application-default login"):
            find_identity(None)

    def test_a_broken_key_file_is_not_shown(self, tmp_path):
        broken = tmp_path / "key.json"
        broken.write_text('{"type": "service_account", "private_key": "SECRET"}')
        with pytest.raises(ProviderError, match="holds no credentials") as refused:
            find_identity(str(broken))
        assert "SECRET" not in str(refused.value)
        with pytest.raises(ProviderError, match="no such file"):
            find_identity(str(tmp_path / "none.json"))

    @pytest.mark.parametrize(
        ("said", "cause"),
        [
            ("Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted.", Cause.QUOTA),
            ('There is no more capacity in the zone "us-central1-b"', Cause.STOCKOUT),
            ("Insufficient reserved capacity. Contact customer support", Cause.STOCKOUT),
            ("The allocation interval (valid until) expired", Cause.WAITED_TOO_LONG),
        ],
    )
    def test_what_users_saw_has_a_cause(self, said, cause):
        assert cause_of_failure(said) is cause


class TestLimits:
    def test_a_full_zone_is_passed_over_for_the_next(self, cloud, launch, tmp_path):
        rows = (
            ChipLimit(zone="us-central1-a", type="v5p", chips=4),
            ChipLimit(zone="europe-west4-b", type="v5p", chips=8),
        )
        limited = launch.model_copy(update={"zone": None, "limits": rows})
        assert CloudTPUProvider(limited).capabilities.limits == rows
        store = Store(tmp_path / "store")
        manager = TpuManager(provider="gcp", launch=limited, state=store)
        zones = [
            manager.allocate_pod(PodConfig(tpu_type="v5p-8"), name=f"job-{number}").zone
            for number in range(3)
        ]
        assert zones == ["us-central1-a", "europe-west4-b", "europe-west4-b"]
        before = len(cloud.world.holdings())
        with pytest.raises(PodUnavailable, match="in europe-west4-b: 8 are in use"):
            manager.allocate_pod(PodConfig(tpu_type="v5p-8"))
        assert len(cloud.world.holdings()) == before
        found = [
            one for one in manager.preflight(PodConfig(tpu_type="v5p-8")) if one.id == "limits"
        ]
        assert [one.severity for one in found] == ["error", "error"]
        store.close()


class TestPreflight:
    def test_all_is_well(self, provider):
        findings = {one.id: one.severity for one in provider.preflight(V6E)}
        assert findings == {
            "gcp-credentials": "ok",
            "gcp-zone": "ok",
            "gcp-type": "ok",
            "gcp-image": "ok",
            "gcp-network": "info",
            "gcp-quota": "info",
        }

    def test_what_is_wrong_is_found(self, cloud, provider):
        config = replace(
            V6E,
            tpu_type="v5p-8",
            software_version="v2-alpha-tpuv6",
            tier=Tier.RESERVED,
            reservation="our",
        )
        findings = {one.id: one for one in provider.preflight(config)}
        for wrong in ("gcp-type", "gcp-image", "gcp-reservation"):
            assert findings[wrong].severity == "error"
        assert "Did you mean 'v2-alpha-tpuv6e'" in findings["gcp-image"].fix
        assert not cloud.world.holdings()

    def test_lost_pods_that_hold_quota_are_named(self, cloud, provider):
        provider.create("old-a1", V6E)
        until(provider, "old-a1", PodState.READY)
        cloud.api.cloud.preempt("old-a1", notice_s=0)
        until(provider, "old-a1", PodState.SUSPENDED)
        quota = provider.preflight(V6E)[-1]
        assert (quota.severity, "old-a1" in quota.seen) == ("warning", True)

    def test_a_bad_zone_ends_it(self, provider):
        assert provider.preflight(V6E.in_zone("mars-1a"))[-1].severity == "error"


def test_the_key_is_made_once_and_is_secret(state):
    key = own_key()
    assert own_key() == key
    assert key.private_file.stat().st_mode & 0o777 == 0o600
    assert key.private_file.is_relative_to(state)
