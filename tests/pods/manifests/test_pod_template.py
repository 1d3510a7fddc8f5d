"""`launch.pod_template`: what a user adds to the Pods of a JobSet, and what may not be changed."""

import json
from importlib.resources import files

import pytest
import yaml
from published_schemas import check

from tpukit.errors import ConfigError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig, Tier
from tpukit.pods.manifests import build_manifest
from tpukit.pods.manifests.pod_template import MERGE_KEYS

USUAL = yaml.safe_load("""
metadata:
  labels: {team: research}
  annotations: {gke-gcsfuse/volumes: "true"}
spec:
  priorityClassName: high
  imagePullSecrets: [{name: registry}]
  terminationGracePeriodSeconds: 300
  tolerations: [{key: team, operator: Equal, value: research, effect: NoSchedule}]
  nodeSelector: {team: research}
  containers:
  - name: train
    resources:
      requests: {cpu: "90", memory: 300Gi}
      limits: {memory: 350Gi}
    env: [{name: LOG_LEVEL, value: debug}]
    volumeMounts: [{name: shm, mountPath: /dev/shm}, {name: data, mountPath: /data}]
  - {name: sidecar, image: "registry/sidecar:1"}
  volumes:
  - {name: shm, emptyDir: {medium: Memory}}
  - name: data
    csi: {driver: gcsfuse.csi.storage.gke.io, volumeAttributes: {bucketName: tokens}}
""")


def made(template, *, on="2xv6e-16", bundle=None):
    settings = LaunchSettings(image="registry/jax:1", pod_template=template)
    command = Command(argv=("run",), environment={"TOKEN": "x"}, bundle=bundle)
    return build_manifest("gem", PodConfig(tpu_type=on, tier=Tier.SPOT), settings, command)


def pod(manifest):
    (entry,) = manifest.jobset["spec"]["replicatedJobs"]
    return entry["template"]["spec"]["template"]


def test_what_is_usual_is_merged_and_valid(tmp_path):
    bundle = tmp_path / "bundle.tar"
    bundle.write_bytes(b"files")
    plain, full = made({}, bundle=bundle), made(USUAL, bundle=bundle)
    check(full, versions=("1.32", "1.37"))
    before, after = pod(plain)["spec"], pod(full)["spec"]
    train, sidecar = after["containers"]
    assert sidecar["image"] == "registry/sidecar:1"
    assert train["resources"]["limits"] == {"google.com/tpu": 4, "memory": "350Gi"}
    assert train["resources"]["requests"] == {"cpu": "90", "memory": "300Gi"}
    mounts = [one["mountPath"] for one in train["volumeMounts"]]
    assert mounts == ["/etc/tpukit", "/dev/shm", "/data"]
    assert train["env"] == [
        *before["containers"][0]["env"],
        {"name": "LOG_LEVEL", "value": "debug"},
    ]
    assert {one["key"] for one in after["tolerations"]} == {
        *("google.com/tpu", "cloud.google.com/gke-spot", "team")
    }
    assert after["nodeSelector"] == {**before["nodeSelector"], "team": "research"}
    assert after["terminationGracePeriodSeconds"] == 300
    assert pod(full)["metadata"]["labels"]["team"] == "research"
    assert pod(full)["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}


def test_the_hosts_network_can_be_chosen():
    chosen = pod(made({"spec": {"hostNetwork": True}}, on="v6e-16"))["spec"]
    assert chosen["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod(made({"spec": {"hostNetwork": False}}))["spec"]["hostNetwork"] is False


def on_train(**fields):
    return {"spec": {"containers": [{"name": "train", **fields}]}}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"spec": {"restartPolicy": "OnFailure"}}, "sets spec.restartPolicy to 'OnFailure', but"),
        (
            {"spec": {"nodeSelector": {"cloud.google.com/gke-tpu-topology": "2x2"}}},
            "gke-tpu-topology to '2x2', but tpukit sets it to '4x4'",
        ),
        (on_train(image="other"), r"containers\[train\].image to 'other', but tpukit sets it"),
        (on_train(args=["x"]), r"containers\[train\].args"),
        (
            on_train(resources={"limits": {"google.com/tpu": 8}}),
            "google.com/tpu to 8, but tpukit sets it to 4",
        ),
        (
            on_train(env=[{"name": "TPUKIT_NUM_HOSTS", "value": "1"}]),
            r"env\[TPUKIT_NUM_HOSTS\].value",
        ),
        ({"spec": {"containers": [{"image": "x"}]}}, "has no 'name'"),
        ({"spec": {"containers": [{"name": ["x"]}, 3]}}, "has no 'name'"),
        ({"metadata": {"name": "mine"}}, "expected only labels and annotations"),
        ({"containers": []}, "expected objects named metadata and spec"),
        ({"spec": None}, "expected objects named metadata and spec"),
    ],
)
def test_what_contradicts_the_job_is_refused(template, words):
    with pytest.raises(ConfigError, match=words):
        made(template)


def test_lists_are_merged_by_the_keys_that_kubernetes_publishes():
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.34.0-local-strict"
    kinds = json.loads((folder / "_definitions.json").read_text())["$defs"]
    published = {
        name: field["x-kubernetes-patch-merge-key"]
        for kind in ("PodSpec", "Container")
        for name, field in kinds[f"io.k8s.api.core.v1.{kind}"]["properties"].items()
        if "x-kubernetes-patch-merge-key" in field and name != "ephemeralContainers"
    }
    assert published == MERGE_KEYS
