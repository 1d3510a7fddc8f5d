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
from tpukit.pods.manifests.names import ACCELERATOR, TOPOLOGY

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
    (f"{SELECTOR}.{CHIP}", "tpu-v6e", "slice.accelerator", "Did you mean"),
    (f"{SELECTOR}.{CHIP}", GONE, "slice.accelerator", "is '', which no node has"),
    (f"{SELECTOR}.{SHAPE}", "4x5", "slice.topology", "4x5"),
    (f"{SELECTOR}.{SHAPE}", "4X4", "slice.topology", "nodes spell it '4x4'"),
    (f"{SELECTOR}.{SHAPE}", GONE, "slice.topology", "Select a legal topology"),
    (LIMIT, 8, "slice.chips", "hosts of v6e-16 have 4"),
    (LIMIT, GONE, "slice.chips", "a Pod requests 0 chips"),
    (f"{JOB}.parallelism", 2, "slice.hosts", "v6e-16 has 4 hosts"),
    (f"{JOB}.completions", 8, "slice.hosts", "completions 8"),
    ("spec.failurePolicy", GONE, "restarts.none", "ends at preemption 1"),
    ("spec.failurePolicy.rules.0.action", "RestartJobSet", "restarts.charged", "preemption 11"),
    (f"{JOB}.podFailurePolicy", GONE, "restarts.charged", "charged to failurePolicy.maxRestarts"),
]


@pytest.mark.parametrize(("path", "value", "id_", "words"), MISTAKES)
def test_a_mistake_is_found(path, value, id_, words):
    (one,) = lint(changed(path, value))
    assert one.id == id_
    assert words in f"{one.seen} {one.fix}"


def test_slices_of_one_host_are_not_joined():
    jobset = copy.deepcopy(DOCUMENTS[-1])
    (entry,) = jobset["spec"]["replicatedJobs"]
    job = entry["template"]["spec"]
    job["parallelism"] = job["completions"] = 1
    spec = job["template"]["spec"]
    spec["nodeSelector"][TOPOLOGY] = "2x2"
    assert [one.id for one in lint([jobset])] == ["slice.multislice"]


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
def test_never_placed_is_said_with_why(pools, words):
    (finding,) = lint(DOCUMENTS, pools=pools).errors
    assert "would never be placed" in finding.seen
    assert words in finding.seen
    assert lint(DOCUMENTS, pools=[pool(), pool(name="q")]).is_ok


def test_the_report_prints_itself(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump_all(changed(f"{JOB}.parallelism", 2)))
    report = lint_files(path)
    out = io.StringIO()
    Console(file=out, width=200).print(report)
    assert re.search(
        r"✗ JobSet gem .*parallelism is 2 and completions 4; v6e-16 has 4 hosts", out.getvalue()
    )
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
