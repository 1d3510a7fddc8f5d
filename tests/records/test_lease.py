"""One process writes a run in a store at a time; a lost or expired lease is noticed."""

import json
import os
import threading

import pytest
from storage_server import READ_ONLY, storage_server

from tpukit.errors import TPUValidationError
from tpukit.records.lease import LEASES, RunLease
from tpukit.runtime.object_store import ObjectStore, open_files


def lease(store):
    return RunLease(store, on_lost=lambda: None)


def abandoned(store, **changes):
    """Leave a lease as a killed process does, with other entries."""
    gone = lease(store)
    gone.take(wait_s=0, instead="")
    gone._over.set()
    owner = json.loads(store.read("lease/000001.json"))
    store.write("lease/000001.json", json.dumps({**owner, **changes}).encode())


def test_a_second_run_is_refused_with_the_owner(store):
    first, second = lease(store), lease(store)
    first.take(wait_s=0, instead="")
    with pytest.raises(TPUValidationError) as refused:
        second.take(wait_s=0, instead="choose another run_dir.")
    assert f"is being written by process {os.getpid()} of " in str(refused.value)
    assert "renewed its lease" in str(refused.value)
    assert "s ago; choose another run_dir." in str(refused.value)
    first.release()
    second.take(wait_s=0, instead="")
    assert (first.epoch, second.epoch) == (1, 2)
    assert [*store.objects(LEASES)] == [f"{LEASES}/000002.json"]
    second.release()


def test_of_two_that_create_the_same_object_one_does(store):
    assert store.create("lease/000001.json", b"a")
    assert not store.create("lease/000001.json", b"b")
    assert store.read("lease/000001.json") == b"a"


def test_the_lease_of_a_killed_process_of_this_machine_is_free_at_once(store):
    abandoned(store, began=1.0)
    again = lease(store)
    again.take(wait_s=0, instead="")
    assert again.epoch == 2
    again.release()


def test_a_lease_of_another_machine_expires_by_the_clock_of_the_store(store, monkeypatch):
    abandoned(store, machine="another", host="far-away")
    with pytest.raises(TPUValidationError, match="far-away"):
        lease(store).take(wait_s=0, instead="")
    accessed = ObjectStore.try_access
    monkeypatch.setattr(
        ObjectStore, "try_access", lambda self, folder: accessed(self, folder) + 31.0
    )
    again = lease(store)
    again.take(wait_s=0, instead="")
    assert again.epoch == 2
    again.release()


def test_an_owner_notices_that_it_lost_the_lease(store, monkeypatch):
    monkeypatch.setattr("tpukit.records.lease.RENEW_S", 0.05)
    lost = threading.Event()
    slow = RunLease(store, on_lost=lost.set)
    slow.take(wait_s=0, instead="")
    store.write("lease/000002.json", b"{}")
    assert lost.wait(600)
    slow.release()
    assert store.read("lease/000002.json") == b"{}"


def test_a_store_without_conditions_still_refuses_the_second_run(monkeypatch):
    with storage_server(has_conditions=False) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        open_files.cache_clear()
        store = ObjectStore("gs://bucket/run")
        assert store.create("other/object", b"a")
        assert store.create("other/object", b"b"), "this server ignores the condition"
        first = lease(store)
        first.take(wait_s=0, instead="")
        with pytest.raises(TPUValidationError, match="is being written by"):
            lease(store).take(wait_s=0, instead="")
        first.release()
        open_files.cache_clear()


def test_a_missing_bucket_is_named(gs):
    with pytest.raises(TPUValidationError, match="There is no bucket gs://nowhere; create it"):
        ObjectStore("gs://nowhere/run").try_access(LEASES)


def test_a_missing_permission_is_named(gs):
    with pytest.raises(TPUValidationError, match=r"may not be written .*roles/storage\.objectUser"):
        ObjectStore(f"gs://{READ_ONLY}/run").try_access(LEASES)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs:/bucket/run", "expected two slashes"),
        ("file:///run", "without file://"),
        ("nosuch://bucket/run", "but got nosuch://"),
        ("gs://", "expected a bucket"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address, said):
    with pytest.raises(TPUValidationError, match=said):
        ObjectStore(address)
