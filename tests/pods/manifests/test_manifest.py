"""Manifests of pods: every generation, every tier, and what must not be in them."""

import base64
import io
import json
import random
import tarfile

import pytest
from published_schemas import check

from tpukit.errors import ConfigError
from tpukit.hardware import list_chips, list_slices
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig, Tier
from tpukit.pods.manifests import build_manifest, lint, queue_documents, read_files
from tpukit.pods.manifests.names import (
    ACCELERATOR,
    FLEX_START,
    QUEUE,
    RESERVATION,
    SPOT,
    TOPOLOGY,
    ZONE,
)

LAUNCH = LaunchSettings(image="registry/jax:1")
COMMAND = Command(argv=("python", "train.py"))
OFFERED = [chip.name for chip in list_chips() if chip.gke_accelerator and chip.rules]


def pod_spec(manifest):
    return manifest.jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def variables(manifest):
    env = pod_spec(manifest)["containers"][0]["env"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in env}


@pytest.mark.parametrize("generation", OFFERED)
def test_every_slice_of_every_generation_passes_the_checks(generation):
    for where in list_slices(generation)[:12]:
        manifest = build_manifest("gem-a1", PodConfig(tpu_type=str(where)), LAUNCH, COMMAND)
        report = lint(manifest.documents)
        assert report.is_ok, report
        assert not report.findings or generation == "v3", report
        job = manifest.jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        limits = pod_spec(manifest)["containers"][0]["resources"]["limits"]
        assert job["parallelism"] * limits["google.com/tpu"] == where.chips


def test_ironwood_is_asked_for_as_the_page_says():
    config = PodConfig(tpu_type="7x:2x2x2", tier=Tier.SPOT, zones=("us-central1-a",))
    spec = pod_spec(build_manifest("gem", config, LAUNCH, COMMAND))
    assert spec["nodeSelector"] == {
        ACCELERATOR: "tpu7x",
        TOPOLOGY: "2x2x2",
        ZONE: "us-central1-a",
        SPOT: "true",
    }
    assert spec["terminationGracePeriodSeconds"] == 15
    assert {one["key"] for one in spec["tolerations"]} == {"google.com/tpu", SPOT}


def test_several_slices_say_who_they_are():
    manifest = build_manifest("gem", PodConfig(tpu_type="2xv5p-32"), LAUNCH, COMMAND)
    said = variables(manifest)
    assert manifest.jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert said["TPUKIT_NUM_HOSTS"] == "8"
    assert said["TPUKIT_HOSTS_PER_SLICE"] == "4"
    assert said["MEGASCALE_NUM_SLICES"] == "2"
    assert said["MEGASCALE_SLICE_ID"] == "$(TPUKIT_SLICE_ID)"
    assert said["MEGASCALE_COORDINATOR_ADDRESS"] == said["TPUKIT_COORDINATOR_HOST"]
    assert "MEGASCALE_NUM_SLICES" not in variables(
        build_manifest("gem", PodConfig(tpu_type="v5p-32"), LAUNCH, COMMAND)
    )


def test_terms_reach_the_selector():
    reserved = PodConfig(tpu_type="v6e-16", tier=Tier.RESERVED, reservation="mine")
    assert pod_spec(build_manifest("g", reserved, LAUNCH))["nodeSelector"][RESERVATION] == "mine"
    flex = LAUNCH.model_copy(update={"flex_start": True})
    made = build_manifest("g", PodConfig(tpu_type="v6e-16"), flex)
    assert pod_spec(made)["nodeSelector"][FLEX_START] == "true"


@pytest.mark.parametrize(
    ("config", "launch", "said"),
    [
        (PodConfig(tpu_type="v6e-16"), LaunchSettings(), "launch.image"),
        (PodConfig(tpu_type="v2-8"), LAUNCH, "GKE offers no"),
        (PodConfig(tpu_type="2xv6e-8"), LAUNCH, "one host each"),
        (PodConfig(tpu_type="v6e-16", tier=Tier.RESERVED), LAUNCH, "launch.reservation"),
        (
            PodConfig(tpu_type="v6e-16", tier=Tier.SPOT),
            LAUNCH.model_copy(update={"flex_start": True}),
            "flex_start and spot",
        ),
    ],
)
def test_what_cannot_be_is_refused(config, launch, said):
    with pytest.raises(ConfigError, match=said):
        build_manifest("gem", config, launch, COMMAND)


def test_secret_values_are_in_no_document_file_or_repr(tmp_path):
    launch = LAUNCH.model_copy(update={"environment": {"MODE": "written", "HF_TOKEN": "$HF_TOKEN"}})
    command = Command(argv=("run",), environment={"MODE": "written", "HF_TOKEN": "hunter2"})
    manifest = build_manifest("gem", PodConfig(tpu_type="v6e-16"), launch, command)
    path = manifest.write(tmp_path)
    for shown in (path.read_text(), repr(manifest), str(manifest.to_dict()), manifest.__rich__()):
        assert "hunter2" not in shown
        assert "written" not in shown
    for name in ("MODE", "HF_TOKEN"):
        assert name in path.read_text()
        reference = {"name": "gem-env", "key": name}
        assert variables(manifest)[name] == {"secretKeyRef": reference}
    assert manifest.secret_document["stringData"] == {"MODE": "written", "HF_TOKEN": "hunter2"}
    assert tuple(read_files(path)) == manifest.documents


def test_files_travel_in_config_maps_that_are_not_too_large(tmp_path):
    archive = tmp_path / "bundle.tar"
    with tarfile.open(archive, "w") as packed:
        info = tarfile.TarInfo("train.py")
        info.size = 5
        packed.addfile(info, io.BytesIO(b"print"))
    command = Command(argv=("python", "train.py"), bundle=archive)
    manifest = build_manifest("gem", PodConfig(tpu_type="v6e-16"), LAUNCH, command)
    config_map, jobset = manifest.documents
    assert jobset is manifest.jobset
    packed = base64.b64decode(config_map["binaryData"]["part-000"])
    with tarfile.open(fileobj=io.BytesIO(packed)) as unpacked:
        assert unpacked.getnames() == ["train.py"]
    large = b"\x1f\x8b" + random.Random(0).randbytes(2_000_000)
    archive.write_bytes(large)
    manifest = build_manifest("gem", PodConfig(tpu_type="v6e-16"), LAUNCH, command)
    *parts, _ = manifest.documents
    assert [one["metadata"]["name"] for one in parts] == ["gem-files", "gem-files-1", "gem-files-2"]
    assert all(len(json.dumps(one)) < 1 << 20 for one in parts)
    contents = {key: value for one in parts for key, value in one["binaryData"].items()}
    joined = b"".join(base64.b64decode(contents[key]) for key in sorted(contents))
    assert joined == large
    (volume,) = pod_spec(manifest)["volumes"]
    mounted = [one["configMap"]["name"] for one in volume["projected"]["sources"]]
    assert mounted == [one["metadata"]["name"] for one in parts]
    check(manifest, versions=("1.32", "1.37"))
    archive.write_bytes(b"\x1f\x8b" + bytes(26_000_000))
    with pytest.raises(ConfigError, match="at most 25,034,752 travel to a cluster"):
        build_manifest("gem", PodConfig(tpu_type="v6e-16"), LAUNCH, command)


def test_priorities_become_classes_and_queues_fit_what_is_asked():
    launch = LAUNCH.model_copy(update={"queue": "tpu"})
    config = PodConfig(tpu_type="v6e-16", priority=7)
    manifest = build_manifest("gem", config, launch, COMMAND)
    assert manifest.documents[0]["value"] == 7
    flavor, queue, local = queue_documents(config, launch)
    assert flavor["spec"]["nodeLabels"].items() <= pod_spec(manifest)["nodeSelector"].items()
    (group,) = queue["spec"]["resourceGroups"]
    assert group["flavors"][0]["resources"] == [{"name": "google.com/tpu", "nominalQuota": 16}]
    assert local["metadata"]["name"] == manifest.jobset["metadata"]["labels"][QUEUE]
    named = launch.model_copy(update={"priority_class": "high"})
    assert [one["kind"] for one in build_manifest("gem", config, named).documents] == ["JobSet"]


def test_arguments_are_not_expanded():
    command = Command(argv=("echo", "$(HOME)", "$$", "a$b"))
    container = pod_spec(build_manifest("g", PodConfig(tpu_type="v6e-8"), LAUNCH, command))
    assert container["containers"][0]["args"] == ["echo", "$$(HOME)", "$$$$", "a$b"]


def test_a_bad_variable_is_named():
    with pytest.raises(ConfigError, match="'A-B' cannot name a variable"):
        build_manifest(
            "g", PodConfig(tpu_type="v6e-8"), LAUNCH, Command(argv=("x",), environment={"A-B": "1"})
        )
