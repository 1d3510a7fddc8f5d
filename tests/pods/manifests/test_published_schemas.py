"""Every manifest is valid by the schemas that JobSet and Kubernetes publish.

`kubeflow-trainer-api` has models generated from JobSet's resource definition, `kubernetes-validate`
the schemas of Kubernetes. JobSet 0.8 is built with Kubernetes 1.32, 0.9 with 1.33, 0.10 with 1.34,
0.11 with 1.35, and a JobSet's Job templates are checked by that version.
"""

import itertools

import pytest
from jsonschema import ValidationError
from published_schemas import check

from tpukit.hardware import list_chips, list_slices
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig, Tier
from tpukit.pods.manifests import build_manifest
from tpukit.pods.manifests.names import EXCLUSIVE, ClusterVersions

COMMAND = Command(argv=("python", "train.py"), environment={"HF_TOKEN": "x"}, setup=(("true",),))
OFFERED = [chip.name for chip in list_chips() if chip.gke_accelerator and chip.rules]
TERMS = {
    "on demand": ({}, {}),
    "spot": ({"tier": Tier.SPOT}, {}),
    "reserved": ({"tier": Tier.RESERVED, "reservation": "mine"}, {}),
    "flex": ({}, {"flex_start": True, "service_account": "trainer"}),
    "zone": ({"zones": ("us-central1-a",)}, {"max_restarts": 0}),
}
QUEUES = ({}, {"queue": "tpu"}, {"queue": "tpu", "priority_class": "high"})


def slices_of(generation):
    """One host, several hosts, and two slices of several hosts."""
    found = list_slices(generation)
    single = [str(where) for where in found if where.hosts == 1][:1]
    several = [str(where) for where in found if where.hosts > 1]
    return [*single, *several[:1], *several[-1:], *(f"2x{where}" for where in several[:1])]


@pytest.mark.parametrize("generation", OFFERED)
def test_every_slice_is_valid(generation):
    kinds = itertools.cycle(itertools.product(TERMS, QUEUES))
    for where in slices_of(generation):
        terms, queue = next(kinds)
        config, launch = TERMS[terms]
        settings = LaunchSettings(image="registry/jax:1", **launch, **queue)
        pod = PodConfig(tpu_type=where, **config)
        check(build_manifest("gem-a1", pod, settings, COMMAND), versions=("1.32", "1.37"))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("patterns", [True, False])
def test_every_term_is_valid(terms, queue, patterns, tmp_path):
    config, launch = TERMS[terms]
    settings = LaunchSettings(image="registry/jax:1", **launch, **queue)
    bundle = tmp_path / "bundle.tar"
    bundle.write_bytes(b"files")
    command = Command(argv=("run",), bundle=bundle, environment={"TOKEN": "x"})
    versions = ClusterVersions(kueue="v1beta1", has_message_patterns=patterns)
    pod = PodConfig(tpu_type="2xv6e-16", priority=3, **config)
    manifest = build_manifest("gem-a1", pod, settings, command, versions=versions)
    check(manifest)
    assert ("onJobFailureMessagePatterns" in str(manifest.jobset)) is patterns


def test_a_field_that_does_not_exist_is_found():
    manifest = build_manifest("gem", PodConfig(tpu_type="v6e-16"), LaunchSettings(image="a"))
    manifest.jobset["spec"]["failurepolicy"] = {}
    with pytest.raises(AssertionError, match="fields that the model does not have"):
        check(manifest)


def test_a_manifest_without_a_condition_status_is_what_older_jobsets_refuse():
    manifest = build_manifest("gem", PodConfig(tpu_type="v6e-16"), LaunchSettings(image="a"))
    (entry,) = manifest.jobset["spec"]["replicatedJobs"]
    rules = entry["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    del rules[0]["onPodConditions"][0]["status"]
    with pytest.raises(ValidationError, match="'status' is a required property"):
        check(manifest, versions=("1.34",))
    check(manifest, versions=("1.35",))


def test_only_slices_of_several_hosts_are_placed_exclusively():
    for where, is_exclusive in (("v6e-8", False), ("v6e-1", False), ("v6e-16", True)):
        pod = PodConfig(tpu_type=where)
        jobset = build_manifest("gem", pod, LaunchSettings(image="a")).jobset
        assert (EXCLUSIVE in jobset["metadata"]["annotations"]) is is_exclusive


def test_the_hosts_network_is_used_between_slices_without_workload_identity():
    for where, account, is_used in (
        ("v6e-16", None, False),
        ("2xv6e-16", None, True),
        ("2xv6e-16", "trainer", False),
    ):
        launch = LaunchSettings(image="a", service_account=account)
        (entry,) = build_manifest("gem", PodConfig(tpu_type=where), launch).jobset["spec"][
            "replicatedJobs"
        ]
        spec = entry["template"]["spec"]["template"]["spec"]
        assert spec.get("hostNetwork", False) is is_used
        assert spec.get("dnsPolicy") == ("ClusterFirstWithHostNet" if is_used else None)
