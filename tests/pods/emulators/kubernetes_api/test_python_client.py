"""The unmodified Python client against the emulated API."""

import base64
import json
import threading
import time

import pytest
from emulated_cluster import small_jobset, until
from kubernetes import client, config, watch
from kubernetes.client.rest import ApiException

from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.kubernetes_api.emulator import Role

JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "default", "jobsets")


def api_client(path):
    return config.new_client_from_config(str(path))


@pytest.fixture
def api(emulator):
    with api_client(emulator.kubeconfig) as api:
        yield api


@pytest.fixture
def core(api):
    return client.CoreV1Api(api)


@pytest.fixture
def custom(api):
    return client.CustomObjectsApi(api)


@pytest.fixture
def jobset(custom):
    """Make a JobSet, and remove it and its Pods afterwards."""
    made = []

    def create(name, *argv, **more):
        made.append(name)
        return custom.create_namespaced_custom_object(*JOBSETS, small_jobset(name, *argv, **more))

    yield create
    for name in made:
        custom.delete_namespaced_custom_object(*JOBSETS, name, propagation_policy="Foreground")
    until(lambda: not custom.list_namespaced_custom_object(*JOBSETS)["items"])


def status_of(error):
    said = json.loads(error.value.body)
    assert said["kind"] == "Status"
    return said["code"], said["reason"]


def test_discovery(api):
    assert client.VersionApi(api).get_code().minor == "34"
    groups = {one.name for one in client.ApisApi(api).get_api_versions().groups}
    assert groups == {"batch", "coordination.k8s.io", "jobset.x-k8s.io", "kueue.x-k8s.io"}


def test_a_jobset_is_made_read_changed_and_removed(custom, jobset):
    made = jobset("crud", "sleep", "60")
    assert made["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"] == "Indexed"
    patched = custom.patch_namespaced_custom_object(
        *JOBSETS, "crud", {"metadata": {"labels": {"a": "b"}}}
    )
    assert patched["metadata"]["labels"]["a"] == "b"
    assert int(patched["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert patched["metadata"]["generation"] == made["metadata"]["generation"]
    found = custom.list_namespaced_custom_object(*JOBSETS, label_selector="a=b")
    assert [one["metadata"]["name"] for one in found["items"]] == ["crud"]
    assert custom.list_namespaced_custom_object(*JOBSETS, label_selector="a!=b")["items"] == []


def test_refusals_are_statuses(custom, core, jobset):
    jobset("twice", "sleep", "60")
    with pytest.raises(ApiException) as error:
        custom.create_namespaced_custom_object(*JOBSETS, small_jobset("twice"))
    assert status_of(error) == (409, "AlreadyExists")
    with pytest.raises(ApiException) as error:
        custom.get_namespaced_custom_object(*JOBSETS, "nobody")
    assert status_of(error) == (404, "NotFound")
    with pytest.raises(ApiException) as error:
        core.create_namespaced_config_map("nowhere", {"metadata": {"name": "x"}})
    assert status_of(error) == (404, "NotFound")
    bad = small_jobset("bad")
    bad["spec"]["failurePolicy"]["rules"][0]["action"] = "Retry"
    with pytest.raises(ApiException) as error:
        custom.create_namespaced_custom_object(*JOBSETS, bad)
    assert status_of(error) == (422, "Invalid")
    stale = custom.get_namespaced_custom_object(*JOBSETS, "twice")
    stale["metadata"]["resourceVersion"] = "1"
    with pytest.raises(ApiException) as error:
        custom.replace_namespaced_custom_object(*JOBSETS, "twice", stale)
    assert status_of(error) == (409, "Conflict")


def test_who_may_do_what(emulator):
    for user, code in (
        ({"token": "wrong"}, 401),
        ({}, 401),
        ({"token": emulator.add_token(Role.NOBODY)}, 403),
    ):
        with api_client(emulator.write_kubeconfig("other", user)) as api:
            with pytest.raises(ApiException) as error:
                client.CoreV1Api(api).list_namespaced_pod("default")
            assert error.value.status == code
    viewer = {"token": emulator.add_token(Role.VIEWER)}
    with api_client(emulator.write_kubeconfig("viewer", viewer)) as api:
        client.CoreV1Api(api).list_node()
        with pytest.raises(ApiException) as error:
            client.CoreV1Api(api).create_namespaced_secret("default", {"metadata": {"name": "x"}})
        assert status_of(error) == (403, "Forbidden")


def test_a_watch_follows_with_bookmarks_and_tells_410(emulator, core):
    listed = core.list_namespaced_config_map("default")
    version = listed.metadata.resource_version
    core.create_namespaced_config_map("default", {"metadata": {"name": "w"}, "data": {"a": "1"}})
    seen = []
    for event in watch.Watch().stream(
        core.list_namespaced_config_map,
        "default",
        resource_version=version,
        allow_watch_bookmarks=True,
        timeout_seconds=60,
    ):
        seen.append(event["type"])
        if len(seen) == 1:
            core.patch_namespaced_config_map("w", "default", {"data": {"a": "2"}})
        elif len(seen) == 2:
            core.delete_namespaced_config_map("w", "default")
        elif event["type"] == "BOOKMARK":
            break
    assert seen == ["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    emulator.cluster.store.forget_history()
    with pytest.raises(ApiException) as error:
        list(
            watch.Watch().stream(
                core.list_namespaced_config_map,
                "default",
                resource_version=version,
                timeout_seconds=60,
            )
        )
    assert error.value.status == 410


def test_lists_come_in_pages(core):
    for index in range(5):
        core.create_namespaced_config_map("default", {"metadata": {"name": f"page{index}"}})
    first = core.list_namespaced_config_map("default", limit=3)
    rest = core.list_namespaced_config_map("default", limit=3, _continue=first.metadata._continue)
    names = [one.metadata.name for one in (*first.items, *rest.items)]
    assert names == [f"page{index}" for index in range(5)]
    core.delete_collection_namespaced_config_map("default")
    assert core.list_namespaced_config_map("default").items == []


def test_secrets_are_stored_encoded(core):
    core.create_namespaced_secret(
        "default", {"metadata": {"name": "s"}, "stringData": {"token": "hunter2"}}
    )
    data = core.read_namespaced_secret("s", "default").data
    assert base64.b64decode(data["token"]) == b"hunter2"
    core.delete_namespaced_secret("s", "default")


def test_logs_are_followed_to_the_end(core, jobset):
    jobset("logs", "sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.1; done")
    selector = "jobset.sigs.k8s.io/jobset-name=logs"
    pods = until(
        lambda: [
            pod
            for pod in core.list_namespaced_pod("default", label_selector=selector).items
            if pod.status.phase in ("Running", "Succeeded")
        ]
    )
    name = pods[0].metadata.name
    lines = list(watch.Watch().stream(core.read_namespaced_pod_log, name, "default"))
    assert lines == ["line 1", "line 2", "line 3"]
    stamped = core.read_namespaced_pod_log(name, "default", timestamps=True).splitlines()
    assert stamped[0].endswith("Z line 1")
    assert core.read_namespaced_pod_log(name, "default", tail_lines=1) == "line 3\n"
    with pytest.raises(ApiException) as error:
        core.read_namespaced_pod_log(name, "default", container="other")
    assert status_of(error) == (400, "BadRequest")


def test_a_pod_can_be_evicted(core, jobset, custom):
    jobset("evicted", "sleep", "60")
    selector = "jobset.sigs.k8s.io/jobset-name=evicted"
    until(
        lambda: (
            len(
                core.list_namespaced_pod(
                    "default", label_selector=selector, field_selector="status.phase=Running"
                ).items
            )
            == 4
        )
    )
    name = core.list_namespaced_pod("default", label_selector=selector).items[0].metadata.name
    core.create_namespaced_pod_eviction(name, "default", {"metadata": {"name": name}})
    until(
        lambda: custom.get_namespaced_custom_object(*JOBSETS, "evicted")["status"]["restarts"] == 1
    )


def test_calls_go_wrong_when_told(emulator, core):
    emulator.faults.add(Fault(Mishap.OUTAGE, calls="list nodes"))
    with pytest.raises(ApiException) as error:
        core.list_node()
    assert status_of(error) == (503, "ServiceUnavailable")
    emulator.faults.add(Fault(Mishap.SLOW, calls="list nodes", pause_s=0.2))
    began = time.monotonic()
    core.list_node()
    assert time.monotonic() - began > 0.2


def test_leases_are_held(api):
    leases = client.CoordinationV1Api(api)
    body = {"metadata": {"name": "lead"}, "spec": {"holderIdentity": "me"}}
    leases.create_namespaced_lease("default", body)
    lease = leases.read_namespaced_lease("lead", "default")
    lease.spec.holder_identity = "you"
    leases.replace_namespaced_lease("lead", "default", lease)
    with pytest.raises(ApiException) as error:
        leases.replace_namespaced_lease("lead", "default", lease)
    assert status_of(error) == (409, "Conflict")


def test_threads_are_few_however_many_watch(emulator, core):
    readers = []
    for _ in range(8):
        lines = watch.Watch().stream(core.list_namespaced_pod, "default", timeout_seconds=1)
        reader = threading.Thread(target=lambda lines=lines: list(lines), daemon=True)
        reader.start()
        readers.append(reader)
    time.sleep(0.3)
    served = [one for one in threading.enumerate() if one.name.startswith("emulated")]
    assert len(served) <= 3
    for reader in readers:
        reader.join()
