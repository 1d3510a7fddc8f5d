"""`tpukit pods` on pods of this machine."""

import json
import threading

import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import ConfigError, PodUnavailable, TPUError, TPUValidationError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.emulation import EMULATORS, open_emulator, serve
from tpukit.pods.manifests import build_manifest, to_yaml


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
    assert run["total"]["reason"] == "'local' runs on machines of your own."
    assert pods("down", "mine-a1").exit_code == 0
    assert listed() == []
    assert "no pods" in pods("ls").stdout


def test_up_again_is_the_same_pod():
    first = json.loads(pods("up", "mine", "--on", "v6e-1", "--json").stdout)
    assert json.loads(pods("up", "mine", "--on", "v6e-1", "--json").stdout) == first
    with pytest.raises(ConfigError, match="wanted already, as v6e-1"):
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


def test_an_emulator_can_be_opened_in_python(tmp_path):
    cloud = open_emulator("gcp", tmp_path)
    cloud.close()
    assert cloud.settings["provider"] == "gcp"


def test_a_cap_is_said_before_anything_is_asked(monkeypatch):
    monkeypatch.setattr("tpukit.pods.prices._OWN_MACHINES", ())
    found = pods("up", "mine", "--on", "v6e-1", "--max-price", "0.01")
    assert found.exit_code == 5
    assert "at most $0.01 an hour" in found.stderr
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
    with pytest.raises(ConfigError, match="holds no Node"):
        pods("lint", str(good), "--nodes", str(good))
    with pytest.raises(ConfigError, match="cannot be read"):
        pods("lint", "none.yaml")
