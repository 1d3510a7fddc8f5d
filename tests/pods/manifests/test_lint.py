"""Checks of manifests: each mistake is found, and nothing else is; any input is answered."""

import copy
import io
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.manifests import NodePool, build_manifest, lint, lint_files, queue_documents
from tpukit.pods.manifests.names import ACCELERATOR, EXCLUSIVE, SLICE_TOPOLOGY, TOPOLOGY

LAUNCH = LaunchSettings(image="registry/jax:1", queue="tpu")
CONFIG = PodConfig(tpu_type="2xv6e-16")
DOCUMENTS = [
    *queue_documents(CONFIG, LAUNCH),
    *build_manifest("gem", CONFIG, LAUNCH, Command(argv=("run",))).documents,
]
JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
GONE = object()
SHAPE, CHIP = TOPOLOGY.replace(".", "|"), ACCELERATOR.replace(".", "|")


def changed(path, value, kind="JobSet"):
    documents = copy.deepcopy(DOCUMENTS)
    place = next(one for one in documents if one["kind"] == kind)
    keys = [int(key) if key.isdigit() else key.replace("|", ".") for key in path.split(".")]
    for key in keys[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
    if value is GONE:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return documents


def test_a_good_manifest_has_nothing_to_object_to():
    assert lint(DOCUMENTS).findings == ()


SELECTOR = f"{POD}.nodeSelector"
LIMIT = f"{POD}.containers.0.resources.limits.google|com/tpu"
MISTAKES = [
    # path, value, id of the finding, words in it
    ("kind", "Jobset", "manifest.kind", "Did you mean 'JobSet'"),
    ("metadata.name", "x" * 60, "jobset.name", "63 are allowed"),
    ("metadata.name", "Gem", "jobset.name", "beginning with a letter"),
    ("spec.coordinator", {"replicatedJob": "slices"}, "jobset.coordinator", "Did you mean 'slice'"),
    (
        f"{POD}.containers.0.env",
        [{"name": "HF_TOKEN", "value": "x"}],
        "manifest.secret",
        "HF_TOKEN",
    ),
    (f"{SELECTOR}.{CHIP}", "tpu-v6e", "slice.accelerator", "Did you mean"),
    (f"{SELECTOR}.{SHAPE}", "4x5", "slice.topology", "4x5"),
    (f"{SELECTOR}.{SHAPE}", "4X4", "slice.topology", "nodes spell it '4x4'"),
    (f"{SELECTOR}.{SHAPE}", GONE, "slice.topology", "any slice of it"),
    (f"{SELECTOR}.{CHIP}", GONE, "slice.accelerator", "no particular generation"),
    (LIMIT, 8, "slice.chips", "hosts of v6e-16 have 4"),
    (LIMIT, GONE, "slice.chips", "request no google.com/tpu"),
    (f"{JOB}.parallelism", 2, "slice.hosts", "v6e-16 has 4 hosts"),
    (f"{JOB}.completions", 8, "slice.completions", "would not run together"),
    (f"{JOB}.completionMode", "NonIndexed", "slice.indexed", "no host has a number"),
    (f"{POD}.tolerations", GONE, "slice.toleration", "do not tolerate"),
    (f"{POD}.dnsPolicy", GONE, "slice.dns", "do not resolve"),
    ("spec.failurePolicy", GONE, "restarts.none", "the first failure"),
    ("spec.failurePolicy.restartStrategy", GONE, "restarts.mixed", "BlockingRecreate"),
    ("spec.failurePolicy.restartStrategy", "InPlaceRestart", "restarts.in_place", "backoffLimit"),
    ("spec.failurePolicy.rules.0", {"action": "FailJobSet"}, "restarts.shadowed", "never applies"),
    ("spec.failurePolicy.rules.0.onJobFailureMessagePatterns", ["("], "restarts.pattern", "'('"),
    (f"{POD}.restartPolicy", GONE, "restarts.alone", "(JobSet's default): podFailurePolicy needs"),
    (f"{JOB}.backoffLimit", GONE, "restarts.backoff", "6 (the default)"),
    (f"{JOB}.podReplacementPolicy", "TerminatingOrFailed", "restarts.replacement", "only"),
    (f"{JOB}.podFailurePolicy", GONE, "restarts.charged", "charged to maxRestarts"),
    (f"{JOB}.podFailurePolicy.rules.1", GONE, "restarts.survivors", "jobset#1117"),
    (f"{JOB}.podFailurePolicy.rules.0.action", "Ignore", "restarts.ignored", "replaced alone"),
    (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.values", [0], "restarts.rule", "not a failure"),
    (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.containerName", "x", "restarts.rule", "train"),
    ("metadata.labels.kueue|x-k8s|io/queue-name", "tpus", "queue.local", "Did you mean 'tpu'"),
    (f"{POD}.containers.0.resources.limits.cpu", 4, "queue.quota", "resource cpu unavailable"),
]


@pytest.mark.parametrize(("path", "value", "id_", "words"), MISTAKES)
def test_a_mistake_is_found(path, value, id_, words):
    report = lint(changed(path, value))
    seen = [f"{one.seen} {one.fix}" for one in report if one.id == id_]
    assert any(words in one for one in seen), report


def test_slices_that_nothing_keeps_together_are_found():
    documents = changed(f"metadata.annotations.{EXCLUSIVE.replace('.', '|')}", GONE)
    del documents[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert [one.id for one in lint(documents)] == ["slice.exclusive"]


QUEUE_MISTAKES = [
    ("ClusterQueue", "spec.stopPolicy", "Hold", "queue.stopped", "is stopped"),
    ("ClusterQueue", "spec.resourceGroups.0.flavors.0.name", "x", "queue.flavor", "inactive"),
    ("ClusterQueue", "spec.resourceGroups.0.coveredResources", ["a"], "queue.covered", "covered"),
    ("ClusterQueue", "metadata.name", "other", "queue.cluster", "no ClusterQueue 'tpu'"),
    (
        "ResourceFlavor",
        f"spec.nodeLabels.{SHAPE}",
        "2x4",
        "queue.quota",
        "2x4",
    ),
    ("ResourceFlavor", "spec.nodeLabels", {}, "queue.counted", "counts only its chips"),
]


@pytest.mark.parametrize(("kind", "path", "value", "id_", "words"), QUEUE_MISTAKES)
def test_a_mistake_in_a_queue_is_found(kind, path, value, id_, words):
    report = lint(changed(path, value, kind))
    seen = [f"{one.seen} {one.fix}" for one in report if one.id == id_]
    assert any(words in one for one in seen), report


def pool(**other):
    labels = {ACCELERATOR: "tpu-v6e-slice", TOPOLOGY: "4x4"} | other.pop("labels", {})
    return NodePool(**{"name": "p", "nodes": 4, "chips": 4, "labels": labels} | other)


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ([], "no node pool matches (there is none)"),
        ([pool(labels={TOPOLOGY: "2x4"})], "gke-tpu-topology is 2x4 there, not 4x4"),
        ([pool(chips=1)], "a node has 1 chips"),
        ([pool(taints=({"key": "own", "effect": "NoSchedule"},))], "taint own is not tolerated"),
        ([pool()], "2 node pools of 4 nodes are needed, one per slice, but 1 exist"),
        ([pool(), pool(name="q", nodes=3)], "q has 3 nodes"),
    ],
)
def test_admitted_and_never_placed_is_said_with_why(pools, words):
    (finding,) = lint(DOCUMENTS, pools=pools).errors
    assert "would be admitted but never placed" in finding.seen
    assert words in finding.seen
    assert lint(DOCUMENTS, pools=[pool(), pool(name="q")]).is_ok


@pytest.mark.parametrize(
    ("topology", "parallelism", "ids"),
    [
        ("4x4x8", 32, []),
        ("4x8x4", 32, ["super_slice.topology"]),
        ("4x4", 32, ["super_slice.topology"]),
        ("8x8x8", 32, ["super_slice.hosts"]),
        ("nonsense", 32, ["super_slice.topology"]),
        ("64x64x64", 32, ["super_slice.topology"]),
    ],
)
def test_super_slices(topology, parallelism, ids):
    config = PodConfig(tpu_type="7x:4x4x8")
    launch = LAUNCH.model_copy(update={"queue": None})
    (jobset,) = build_manifest("gem", config, launch).documents
    jobset["metadata"]["annotations"][EXCLUSIVE] = "cloud.google.com/gke-tpu-slice"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["parallelism"] = job["completions"] = parallelism
    job["template"]["metadata"]["annotations"] = {
        SLICE_TOPOLOGY: topology,
        "kueue.x-k8s.io/podset-slice-size": "16",
        "kueue.x-k8s.io/podset-slice-required-topology": "cloud.google.com/gke-tpu-partition",
    }
    assert [one.id for one in lint([jobset])] == ids
    job["template"]["metadata"]["annotations"]["kueue.x-k8s.io/podset-slice-size"] = "24"
    assert "super_slice.count" in [one.id for one in lint([jobset])]
    del jobset["metadata"]["annotations"][EXCLUSIVE]
    assert ids or "super_slice.exclusive" in [one.id for one in lint([jobset])]


def test_the_report_prints_itself(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump_all(changed(f"{JOB}.parallelism", 2)))
    report = lint_files(path)
    out = io.StringIO()
    Console(file=out, width=200).print(report)
    assert re.search(r"✗ JobSet gem .*parallelism is 2; v6e-16 has 4 hosts", out.getvalue())
    assert report.to_dict()["ok"] is False


# Any place in a good manifest may hold anything.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else inside:
        yield from places(inner, (*path, key))


PLACES = [path for path in places(DOCUMENTS) if path]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), ANYTHING)
def test_any_manifest_is_answered(path, value):
    documents = copy.deepcopy(DOCUMENTS)
    place = documents
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    kept = [one for one in documents if isinstance(one, dict)]
    for finding in lint(kept, pools=[pool()]):
        assert finding.seen
