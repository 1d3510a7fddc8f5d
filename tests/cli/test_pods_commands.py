"""`tpukit pods` on pods of this machine."""

import json
import threading
import time

import pytest
import yaml
from scripted_provider import ScriptedProvider
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import (
    ConfigError,
    PodUnavailable,
    ProviderError,
    TPUError,
    TPUValidationError,
)
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig, Store
from tpukit.pods.cost import CostReport
from tpukit.pods.emulation import EMULATORS, open_emulator, serve
from tpukit.pods.manifests import build_manifest, to_yaml
from tpukit.pods.reconciler import Reconciler
from tpukit.pods.store import ProviderRecord


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TPUKIT_LOCAL_HOSTS", "2")
    monkeypatch.delenv("TPUKIT_PROVIDER", raising=False)


def pods(*words):
    found = CliRunner().invoke(app, ["pods", *words])
    if isinstance(found.exception, TPUError):
        raise found.exception
    return found


def listed():
    return json.loads(pods("ls", "--json").stdout)["pods"]


def test_up_ls_cost_down():
    said = json.loads(pods("up", "mine", "--on", "v6e-8", "--json").stdout)
    assert (said["name"], said["state"], len(said["hosts"])) == ("mine-a1", "ready", 1)
    (row,) = listed()
    assert (row["name"], row["state"], row["zone"]) == ("mine", "ready", "local-a")
    assert "mine-a1" in pods("ls").stdout
    (run,) = json.loads(pods("cost", "--json").stdout)["runs"]
    assert run["running"]
    assert run["total"]["reason"] == "'local' uses your own machines."
    assert pods("down", "mine-a1").exit_code == 0
    assert listed() == []
    assert "no pods" in pods("ls").stdout


def test_up_again_is_the_same_pod():
    first = json.loads(pods("up", "mine", "--on", "v6e-1", "--json").stdout)
    assert json.loads(pods("up", "mine", "--on", "v6e-1", "--json").stdout) == first
    with pytest.raises(ConfigError, match="already wanted, as v6e-1"):
        pods("up", "mine", "--on", "v6e-4")


def test_what_cannot_be_had_is_exit_5_and_leaves_nothing():
    found = pods("up", "mine", "--on", "v6e-64", "--zone", "local-b")
    assert found.exit_code == 5
    assert "room for 2" in found.stderr
    assert listed() == []


def test_names_that_are_not_known():
    pods("up", "mine", "--on", "v6e-1")
    with pytest.raises(TPUValidationError, match="Did you mean 'mine'"):
        pods("down", "mime")
    with pytest.raises(TPUValidationError, match="There is no run 'mine'"):
        pods("logs", "mine")
    with pytest.raises(ConfigError, match="processes of this machine"):
        pods("ssh", "mine")


def test_a_provider_that_is_gone_keeps_nobody_waiting(monkeypatch):
    cloud = ScriptedProvider(script=["refuse"] * 1000)
    clock = [time.time()]
    store = Store(now=lambda: clock[0])
    config = PodConfig(tpu_type="v6e-8", zones=("us-east5-b",))
    store.wanted.want("mine", config, ProviderRecord.of("gcp", LaunchSettings(project="p")))
    cloud.script.clear()
    Reconciler(store, opener=lambda record: cloud).run_pass()
    cloud.script = ["refuse"] * 1000
    monkeypatch.setattr("tpukit.pods.reconciler.open_provider", lambda *_: cloud)
    with pytest.raises(ProviderError, match="tpukit pods forget mine removes it from the store"):
        pods("down", "mine")
    assert cloud.calls.count("list") <= 4, "tried twice after the first pass"
    clock[0] += 2 * 3600.0
    (run,) = CostReport.of(store).runs
    assert run.hours < 0.5, "not counted since it was last seen"
    assert "because the provider has not answered since" in run.unseen
    assert "pods forget mine" in pods("cost").stdout.replace("\n", " ")
    forgotten = pods("forget", "mine-a1")
    assert "goes on costing" in forgotten.stderr
    assert (store.wanted.all(), store.wanted.providers()) == ([], {})
    (run,) = CostReport.of(store).runs
    assert (run.unseen, run.is_running) == ("", False)
    with pytest.raises(TPUValidationError, match="no pod 'mine'"):
        pods("forget", "mine")
    store.close()


def test_a_provider_that_answers_again_counts_again(tmp_path):
    cloud, clock = ScriptedProvider(), [1e9]
    store = Store(tmp_path / "other", now=lambda: clock[0])
    config = PodConfig(tpu_type="v6e-8", zones=("us-east5-b",))
    store.wanted.want("mine", config, ProviderRecord.of("gcp", LaunchSettings(project="p")))
    reconciler = Reconciler(store, opener=lambda record: cloud)
    for hour, script in enumerate((["ok"], ["ok"], ["refuse"], ["refuse"], ["ok"])):
        clock[0] = 1e9 + 3600 * hour
        cloud.script = script
        reconciler.run_pass()
        (run,) = CostReport.of(store).runs
        assert (run.hours, bool(run.unseen)) == ([0, 1, 1, 1, 4][hour], hour in (2, 3))
    store.close()


def test_preflight_says_what_is_in_the_way():
    assert pods("preflight", "--on", "v6e-8").exit_code == 0
    found = pods("preflight", "--on", "v6e-64", "--json")
    assert found.exit_code == 1
    assert not json.loads(found.stdout)["clear"]
    with pytest.raises(ConfigError, match="which slice"):
        pods("preflight")


def test_emulators_are_listed_and_odd_ones_refused():
    assert {line.split()[0] for line in pods("emulate").stdout.splitlines()} == set(EMULATORS)
    with pytest.raises(ConfigError, match="Did you mean 'gcp'"):
        pods("emulate", "gpc")


@pytest.mark.parametrize("name", EMULATORS)
def test_an_emulator_says_how_to_launch_on_it(name, tmp_path):
    lines, ended = [], threading.Event()

    def say(line):
        lines.append(line)
        if line.startswith("launch:"):
            ended.set()

    serve(name, tmp_path / name, say, until=ended)
    assert lines[0] == f"# {EMULATORS[name].meaning}; Ctrl-C ends it"
    assert f"provider: {name}" in lines[-1]
    if name != "gke":  # a cluster's nodes are where they are
        zone = yaml.safe_load(lines[-1])["launch"]["zone"]
        assert any(line.startswith(f"# zone {zone}: ") and "v6e" in line for line in lines)


def test_an_emulator_can_be_opened_in_python(tmp_path):
    cloud = open_emulator("gcp", tmp_path)
    cloud.close()
    assert cloud.settings["provider"] == "gcp"


def test_a_cap_is_said_before_anything_is_asked(monkeypatch):
    monkeypatch.setattr("tpukit.pods.cost._OWN_MACHINES", ())
    found = pods("up", "mine", "--on", "v6e-1", "--max-price", "0.01")
    assert found.exit_code == 5
    assert "at most $0.01 per hour" in found.stderr
    assert PodUnavailable.__name__ not in found.stderr


def test_manifests_are_checked_without_a_cluster(tmp_path):
    launch = LaunchSettings(image="registry/jax:1")
    manifest = build_manifest("gem", PodConfig(tpu_type="v6e-16"), launch, Command(argv=("true",)))
    good = tmp_path / "job.yaml"
    good.write_text(to_yaml(manifest.documents))
    assert pods("lint", str(good)).exit_code == 0
    node = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n", "labels": {}}}
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": [node]}))
    placed = pods("lint", str(good), "--nodes", str(nodes), "--json")
    assert placed.exit_code == 1
    assert "never be placed" in json.loads(placed.stdout)["findings"][0]["seen"]
    with pytest.raises(ConfigError, match="contains no Node"):
        pods("lint", str(good), "--nodes", str(good))
    with pytest.raises(ConfigError, match="cannot be read"):
        pods("lint", "none.yaml")
