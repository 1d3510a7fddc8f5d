"""The emulated API server checks every field by schemas that others publish."""

import copy

import pytest

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.manifests import build_manifest
from tpukit_emulators.kubernetes_api.admission import Admission
from tpukit_emulators.kubernetes_api.kinds import JOBSET, Installed
from tpukit_emulators.kubernetes_api.refusal import Refusal
from tpukit_emulators.kubernetes_api.schema import field_errors

LAUNCH = LaunchSettings(image="registry/jax:1", queue="tpu", environment={"TOKEN": "x"})
MANIFEST = build_manifest("gem", PodConfig(tpu_type="2xv6e-16"), LAUNCH, Command(argv=("run",)))
JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
CONDITION = f"{JOB}.podFailurePolicy.rules.0.onPodConditions.0"
GONE = object()


def changed(path, value):
    document = copy.deepcopy(MANIFEST.jobset)
    place = document
    keys = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in keys[:-1]:
        place = place[key]
    if value is GONE:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "problem", "words"),
    [
        ("spec.failurepolicy", {}, "unknown", "no field 'failurepolicy'"),
        ("spec.failurePolicy.rules.0.reason", "x", "unknown", "no field 'reason'"),
        (f"{POD}.nodeselector", {}, "unknown", "Did you mean 'nodeSelector'"),
        ("spec.replicatedJobs.0.replicas", "2", "invalid", "valid integer"),
        ("spec.failurePolicy.rules.0.action", GONE, "invalid", "required"),
        (f"{JOB}.template", GONE, "invalid", "'template' is a required property"),
        (f"{POD}.nodeSelector.x", True, "invalid", "True is not of type"),
        (f"{POD}.containers.0.name", GONE, "invalid", "'name' is a required property"),
        # What JobSet 0.8 to 0.10 refused: Kubernetes 1.34 and older require it.
        (f"{CONDITION}.status", GONE, "invalid", "'status' is a required property"),
    ],
)
def test_a_wrong_field_is_named(path, value, problem, words):
    (error,) = field_errors(changed(path, value))
    assert error.problem == problem
    assert words in error.message


def test_documents_of_a_pod_have_no_errors():
    for document in (*MANIFEST.documents, MANIFEST.secret_document):
        assert field_errors(document) == []


@pytest.mark.parametrize("version", [(0, 9), (0, 10)])
def test_old_versions_of_jobset_refuse_what_they_do_not_know(version):
    admission = Admission(None, Installed(jobset=version))
    if version >= (0, 10):
        admission._check(JOBSET, MANIFEST.jobset, "gem", strict=True)
        return
    with pytest.raises(Refusal, match=r"unknown field.*onJobFailureMessagePatterns"):
        admission._check(JOBSET, copy.deepcopy(MANIFEST.jobset), "gem", strict=True)
