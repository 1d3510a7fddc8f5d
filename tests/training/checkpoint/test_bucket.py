"""The same checkpointer on gs://, with the real client libraries against a bucket on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# One worker: the fixture that all of them share is dear.
pytestmark = pytest.mark.xdist_group("bucket")

PROCESS = Path(__file__).with_name("bucket_process.py")


@pytest.fixture(scope="module")
def told(bucket_server):
    """What a process that trained in a bucket reported, line by line."""
    bucket, environment = bucket_server
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), "gs://bucket/runs/one"],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = []
    with process:
        for line in process.stdout:
            lines.append(json.loads(line))
            if wish := lines[-1].get("wish"):
                damage(bucket, wish)
                process.stdin.write("done\n")
                process.stdin.flush()
    assert process.returncode == 0
    return lines, bucket


def damage(bucket, wish):
    sizes = {
        name: len(content)
        for name, (content, _) in bucket.objects.items()
        if name.startswith("runs/one/3/params")
    }
    largest = max(sizes, key=sizes.get)
    if wish == "REMOVE":
        del bucket.objects[largest]
    else:
        content = bytearray(bucket.objects[largest][0])
        content[100] ^= 1
        bucket.put(largest, bytes(content))


def test_saved_kept_verified_and_restored(told):
    (saved, _, restored, *_), bucket = told
    assert saved["steps"] == [2, 3]
    assert saved["verify"]["good"]
    assert restored == {"step": 3, "sum": 64 * 32 * 3.0, "data": {"i": 3}}
    assert not any(name.startswith("runs/one/1/") for name in bucket.objects)


def test_another_run_is_refused(told):
    (_, refused, *_), _ = told
    assert "another run, up to step 3" in refused["refusal"]


def test_changed_and_missing_objects_are_passed_over(told):
    (*_, _, changed, _, removed, _, _), _ = told
    assert changed["step"] == removed["step"] == 2
    assert "has digest crc32c:" in changed["skipped"]
    assert "is missing" in removed["skipped"]


def test_buckets_that_cannot_be_used_say_what_to_do(told):
    (*_, forbidden, missing), _ = told
    assert "gs://forbidden cannot be read" in forbidden["refusal"]
    assert "gcloud auth application-default login" in forbidden["refusal"]
    assert "There is no bucket gs://missing" in missing["refusal"]


def test_the_arrays_go_through_tensorstore(told):
    _, bucket = told
    assert any("tensorstore" in path for _, path in bucket.requests)
