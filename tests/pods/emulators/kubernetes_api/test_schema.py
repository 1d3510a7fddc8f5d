"""The emulated API server checks every field that tpukit's manifests may have."""

import copy

import pytest

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.manifests import build_manifest, queue_documents
from tpukit_emulators.kubernetes_api.schema import field_errors

LAUNCH = LaunchSettings(image="registry/jax:1", queue="tpu")
CONFIG = PodConfig(tpu_type="2xv6e-16")
DOCUMENTS = [
    *queue_documents(CONFIG, LAUNCH),
    *build_manifest("gem", CONFIG, LAUNCH, Command(argv=("run",))).documents,
]
JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
GONE = object()


def test_documents_of_a_pod_have_no_errors():
    assert [error for document in DOCUMENTS for error in field_errors(document)] == []


@pytest.mark.parametrize(
    ("kind", "path", "value", "problem", "words"),
    [
        ("JobSet", "spec.failurepolicy", {}, "unknown", "Did you mean 'failurePolicy'"),
        ("JobSet", f"{POD}.nodeselector", {}, "unknown", "Did you mean 'nodeSelector'"),
        ("JobSet", "spec.replicatedJobs.0.replicas", "2", "type", "'2' is not a whole number"),
        ("JobSet", "spec.failurePolicy.rules.0.action", "RestartJobset", "choice", "Did you mean"),
        ("JobSet", f"{JOB}.template", GONE, "missing", "'template' is missing"),
        ("JobSet", f"{POD}.nodeSelector.x", True, "type", "put it in quotes"),
        ("ClusterQueue", "spec.cohort", "x", "gone", "cohortName"),
        ("ClusterQueue", "spec.admissionChecks", ["x"], "gone", "admissionChecksStrategy"),
    ],
)
def test_a_wrong_field_is_named(kind, path, value, problem, words):
    document = copy.deepcopy(next(one for one in DOCUMENTS if one["kind"] == kind))
    place = document
    keys = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in keys[:-1]:
        place = place[key]
    if value is GONE:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    (error,) = field_errors(document)
    assert error.problem == problem
    assert words in error.message
