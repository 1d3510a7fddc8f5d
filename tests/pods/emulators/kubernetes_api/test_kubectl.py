"""The unmodified kubectl against the emulated API."""

import json
import os
import shutil
import subprocess

import pytest
from emulated_cluster import LAUNCH, small_jobset, until

from tpukit.pods import PodConfig
from tpukit.pods.manifests import queue_documents, to_yaml

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")

TRICKY = [
    *("y", "no", "on", "1e3", "0o17", "1:30", "~", "2024-01-01", "", " a ", "a: b", "#x"),
    *("\t", "é\u2028", "multi\nline\n", "$(A)", "=", "<<", "0x1F", ".5", "1_000", "TRUE", "'", '"'),
]


@pytest.fixture
def kubectl(emulator, tmp_path):
    def run(*arguments, code=0, given=None):
        variables = {"KUBECONFIG": str(emulator.kubeconfig), "HOME": str(tmp_path)}
        done = subprocess.run(
            ["kubectl", *arguments],
            env={"PATH": os.environ["PATH"], **variables},
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


def test_a_job_from_apply_to_delete(kubectl, tmp_path):
    path, seen = tmp_path / "gem.yaml", tmp_path / "seen"
    command = f"echo hello; until [ -e {seen} ]; do sleep 0.1; done"
    path.write_text(to_yaml([small_jobset("gem", "sh", "-c", command)]))
    assert "jobset.jobset.x-k8s.io/gem created" in kubectl("apply", "-f", path)
    assert "unchanged" in kubectl("apply", "-f", path)
    kubectl("wait", "--for=jsonpath={.status.replicatedJobsStatus[0].ready}=1", "jobset/gem")
    assert "gke-a-0" in kubectl("get", "pods", "-o", "wide")
    seen.touch()
    selector = "jobset.sigs.k8s.io/jobset-name=gem"
    said = kubectl("logs", "-f", "-l", selector, "--prefix", "--max-log-requests=8")
    assert said.count("hello") == 4
    kubectl("wait", "--for=condition=Completed", "jobset/gem", "--timeout=20s")
    titles, row = kubectl("get", "jobsets").splitlines()
    assert titles.split() == [
        "NAME",
        "TERMINALSTATE",
        "RESTARTS",
        "COMPLETED",
        "SUSPENDED",
        "AGE",
    ]
    assert row.split()[:4] == ["gem", "Completed", "0", "True"]
    assert "AllJobsCompleted" in kubectl("describe", "jobset", "gem")
    assert "Scheduled" in kubectl("get", "events")
    name = kubectl("get", "pods", "-o", "name").splitlines()[0]
    assert "gke-tpu-accelerator=tpu-v6e-slice" in kubectl("describe", name)
    assert '"gem" deleted' in kubectl("delete", "-f", path)
    until(lambda: "No resources found" in kubectl("get", "pods,jobs,jobsets"))


def test_server_side_apply_and_patches(kubectl, tmp_path):
    path = tmp_path / "map.yaml"
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ssa"}}
    path.write_text(to_yaml([document | {"data": {"a": "1"}}]))
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", path)
    path.write_text(to_yaml([document | {"data": {"a": "2"}}]))
    kubectl("apply", "--server-side", "-f", path)
    kubectl("patch", "configmap", "ssa", "-p", '{"data": {"b": "3"}}')
    kubectl(
        "patch", "cm", "ssa", "--type=json", "-p", '[{"op":"add","path":"/data/c","value":"4"}]'
    )
    kubectl("label", "cm", "ssa", "x=y")
    kubectl("annotate", "cm", "ssa", "n=1")
    found = json.loads(kubectl("get", "cm", "ssa", "-o", "json"))
    assert found["data"] == {"a": "2", "b": "3", "c": "4"}
    assert found["metadata"]["labels"] == {"x": "y"}
    kubectl("delete", "cm", "ssa")


def test_text_arrives_as_it_was_written(kubectl):
    data = {f"k{index}": text for index, text in enumerate(TRICKY)}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "t"}, "data": data}
    kubectl("create", "-f", "-", given=to_yaml([document]))
    assert json.loads(kubectl("get", "cm", "t", "-o", "json"))["data"] == data
    kubectl("delete", "cm", "t")


def test_unknown_fields_are_refused(kubectl):
    bad = small_jobset("bad")
    bad["spec"]["failurepolicy"] = {}
    said = kubectl("apply", "-f", "-", given=to_yaml([bad]), code=1)
    assert 'unknown field "spec.failurepolicy"' in said


def test_queues_nodes_and_secrets(kubectl, tmp_path):
    launch = LAUNCH.model_copy(update={"queue": "tpu"})
    queues = queue_documents(PodConfig(tpu_type="v6e-16"), launch)
    kubectl("apply", "-f", "-", given=to_yaml([*queues, small_jobset("queued", launch=launch)]))
    until(lambda: "True" in kubectl("get", "kwl"))
    assert "tpu" in kubectl("get", "cq")
    assert "tpu" in kubectl("get", "localqueues")
    assert "tpu-tpu-v6e-slice-4x4" in kubectl("get", "rf")
    kubectl("delete", "jobset", "queued")
    kubectl("delete", "localqueue,clusterqueue", "tpu")
    assert kubectl("get", "nodes").count("gke-") == 8
    (tmp_path / "env").write_text("HF_TOKEN=hunter2\n")
    kubectl("create", "secret", "generic", "s", f"--from-env-file={tmp_path / 'env'}")
    assert "HF_TOKEN:  7 bytes" in kubectl("describe", "secret", "s")
    kubectl("delete", "secret", "s")


def test_a_node_is_drained(kubectl):
    given = to_yaml([small_jobset("drained", "sleep", "60")])
    kubectl("apply", "-f", "-", given=given)
    kubectl("wait", "--for=jsonpath={.status.replicatedJobsStatus[0].ready}=1", "jobset/drained")
    node = kubectl("get", "pods", "-o", "jsonpath={.items[0].spec.nodeName}")
    assert "drained" in kubectl("drain", node, "--force", "--ignore-daemonsets")
    restarts = ("get", "jobset", "drained", "-o", "jsonpath={.status.restarts}")
    until(lambda: kubectl(*restarts) == "1")
    kubectl("uncordon", node)
    kubectl("delete", "jobset", "drained")


def test_a_command_runs_beside_the_containers_own(kubectl):
    given = to_yaml([small_jobset("shell", "sleep", "60")])
    kubectl("apply", "-f", "-", given=given)
    kubectl("wait", "--for=jsonpath={.status.replicatedJobsStatus[0].ready}=1", "jobset/shell")
    name = kubectl("get", "pods", "-o", "name").splitlines()[0]
    assert kubectl("exec", "-i", name, "--", "cat", given="typed\n" * 9999) == "typed\n" * 9999
    assert "TPU_WORKER_ID" in kubectl("exec", name, "--", "env")
    said = kubectl("exec", name, "--", "sh", "-c", "echo no >&2; exit 7", code=7)
    assert said == "no\ncommand terminated with exit code 7\n"
    assert "is not valid for the pod" in kubectl("exec", name, "-c", "x", "--", "ls", code=1)
    kubectl("exec", name, "--", "/none", code=126)
    kubectl("delete", "jobset", "shell")


def test_kubectl_says_who_may_not(kubectl, emulator):
    said = kubectl("get", "pods", f"--token={emulator.token}x", code=1)
    assert "Unauthorized" in said or "must be logged in" in said
