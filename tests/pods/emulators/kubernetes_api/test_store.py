"""The rules of the API's objects, without HTTP."""

import pytest

from tpukit_emulators.clock import DrivenClock
from tpukit_emulators.kubernetes_api.kinds import CONFIG_MAP, JOB, JOBSET
from tpukit_emulators.kubernetes_api.patches import json_patch, merge, strategic_merge
from tpukit_emulators.kubernetes_api.recording import owned_by
from tpukit_emulators.kubernetes_api.refusal import Refusal
from tpukit_emulators.kubernetes_api.selectors import field_selector, label_selector
from tpukit_emulators.kubernetes_api.store import Store


@pytest.fixture
def store():
    return Store(DrivenClock(), history=5)


def made(store, name="x", kind=JOBSET, **more):
    metadata = {"name": name, "namespace": "default", **more}
    return store.create(kind, {"metadata": metadata, "spec": {"a": 1}})


def test_versions_grow_and_generations_count_changes_of_the_spec(store):
    first = made(store)
    again = store.write(JOBSET, "default", "x", {**first, "spec": {"a": 2}})
    assert int(again["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    assert (first["metadata"]["generation"], again["metadata"]["generation"]) == (1, 2)
    told = store.write(JOBSET, "default", "x", {**again, "status": {"b": 1}}, part="status")
    assert told["metadata"]["generation"] == 2
    assert (told["spec"], told["status"]) == ({"a": 2}, {"b": 1})


def test_the_main_part_does_not_touch_the_status_nor_the_other_way(store):
    first = made(store)
    store.write(JOBSET, "default", "x", {**first, "status": {"b": 1}}, part="status")
    current = store.get(JOBSET, "default", "x")
    after = store.write(JOBSET, "default", "x", {**current, "status": {"b": 2}, "spec": {"a": 3}})
    assert (after["spec"], after["status"]) == ({"a": 3}, {"b": 1})


def test_what_was_read_before_a_change_is_refused(store):
    first = made(store)
    store.write(JOBSET, "default", "x", {**first, "spec": {"a": 2}})
    with pytest.raises(Refusal, match="has been modified") as refused:
        store.write(JOBSET, "default", "x", {**first, "spec": {"a": 3}})
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    with pytest.raises(Refusal, match="already exists"):
        made(store)


def test_a_change_that_changes_nothing_is_none(store):
    first = made(store)
    assert store.write(JOBSET, "default", "x", first) is first


def test_finalizers_hold_what_is_deleted(store):
    made(store, finalizers=["hold"])
    store.delete(JOBSET, "default", "x")
    held = store.get(JOBSET, "default", "x")
    assert held["metadata"]["deletionTimestamp"]
    store.change(JOBSET, held, lambda one: one["metadata"].update(finalizers=[]))
    assert store.find(JOBSET, "default", "x") is None


def test_orphans_stay(store):
    owner = made(store)
    made(store, "y", JOB, ownerReferences=[owned_by(owner)])
    store.delete(JOBSET, "default", "x", propagation="Orphan")
    assert store.get(JOB, "default", "y")["metadata"]["ownerReferences"] == []


def test_history_is_kept_for_so_long(store):
    version = store.version
    for index in range(4):
        made(store, f"x{index}")
    assert [one.object["metadata"]["name"] for one in store.since(version)] == [
        "x0",
        "x1",
        "x2",
        "x3",
    ]
    for index in range(4):
        made(store, f"y{index}")
    with pytest.raises(Refusal) as refused:
        store.since(version)
    assert (refused.value.code, refused.value.reason) == (410, "Expired")
    assert store.since(store.version) == []


def test_patches():
    target = {"a": {"b": 1, "c": 2}, "l": [1, 2]}
    assert merge(target, {"a": {"b": None, "d": 3}, "l": [3]}) == {
        "a": {"c": 2, "d": 3},
        "l": [3],
    }
    pod = {"containers": [{"name": "x", "image": "1"}, {"name": "y"}], "args": [1]}
    patch = {"containers": [{"name": "x", "image": "2"}, {"name": "y", "$patch": "delete"}]}
    assert strategic_merge(pod, patch) == {"containers": [{"name": "x", "image": "2"}], "args": [1]}
    operations = [
        {"op": "test", "path": "/a/b", "value": 1},
        {"op": "replace", "path": "/a/b", "value": 5},
        {"op": "add", "path": "/l/-", "value": 9},
        {"op": "remove", "path": "/l/0"},
        {"op": "copy", "from": "/a/b", "path": "/a/e~1f"},
    ]
    assert json_patch(target, operations) == {"a": {"b": 5, "c": 2, "e/f": 5}, "l": [2, 9]}
    assert target == {"a": {"b": 1, "c": 2}, "l": [1, 2]}
    for bad in ({"op": "test", "path": "/a/b", "value": 2}, {"op": "remove", "path": "/x/y"}):
        with pytest.raises(Refusal):
            json_patch(target, [bad])


@pytest.mark.parametrize(
    ("selector", "holds"),
    [
        ("a=1", True),
        ("a==2", False),
        ("a!=2,b", True),
        ("!c", True),
        ("!a", False),
        ("a in (1, 2),b notin (x)", True),
        ("", True),
        ("jobset.sigs.k8s.io/jobset-name=j", True),
    ],
)
def test_label_selectors(selector, holds):
    labels = {"a": "1", "b": "y", "jobset.sigs.k8s.io/jobset-name": "j"}
    assert label_selector(selector)({"metadata": {"labels": labels}}) is holds


def test_field_selectors():
    one = {"metadata": {"name": "x"}, "status": {"phase": "Running"}}
    assert field_selector("metadata.name=x,status.phase!=Failed")(one)
    assert not field_selector("spec.nodeName=a")(one)
    for bad in (label_selector, field_selector):
        with pytest.raises(Refusal):
            bad("a ~ b")


def test_config_maps_have_no_generation(store):
    assert "generation" not in store.create(CONFIG_MAP, {"metadata": {"name": "c"}})["metadata"]
