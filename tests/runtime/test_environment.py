"""The environment is right for the machine, the user's own settings win, and late is said."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from tpukit.errors import ConfigError
from tpukit.hardware.detect import Accelerators
from tpukit.runtime import environment as room
from tpukit.runtime.environment import configure_tpu_environment, environment_for


@pytest.fixture
def machine(monkeypatch):
    """Make the machine look like one with the given accelerator and installed packages."""

    def pretend(kind, *, installed=("libtpu", "jax-cuda13-plugin")):
        found = Accelerators(kind=kind, count=4, evidence=(f"a {kind} was seen",))
        monkeypatch.setattr(room, "detect_accelerators", lambda **_: found)
        monkeypatch.setattr(
            room,
            "is_any_installed",
            lambda prefix: any(name.startswith(prefix) for name in installed),
        )

    return pretend


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tpu", {"JAX_PLATFORMS": "tpu,cpu"}),
        ("gpu", {"JAX_PLATFORMS": "cuda,cpu", "TPU_SKIP_MDS_QUERY": "1"}),
        ("cpu", {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}),
    ],
)
def test_each_machine_gets_what_is_right_for_it(machine, kind, expected):
    machine(kind)
    environment = {"HOME": "/home/me"}
    report = configure_tpu_environment(environment=environment)
    assert environment == {"HOME": "/home/me", **expected}
    assert report.platform == kind
    assert report.evidence == (f"a {kind} was seen",)
    assert {change.name: change.after for change in report.changes} == expected
    assert all(change.outcome == "set" and change.why for change in report.changes)


def test_a_second_call_changes_nothing(machine):
    machine("cpu")
    environment = {}
    configure_tpu_environment(environment=environment)
    before = dict(environment)
    report = configure_tpu_environment(environment=environment)
    assert environment == before
    assert {change.outcome for change in report.changes} == {"kept"}
    assert {change.why for change in report.changes} == {"already so"}


def test_what_the_user_set_is_kept_and_said(machine):
    machine("tpu")
    environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "0"}
    report = configure_tpu_environment(environment=environment)
    assert environment == {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "0"}
    assert report.platform == "cpu", "jax will run where JAX_PLATFORMS says"
    assert report.evidence == ("JAX_PLATFORMS=cpu is set", "a tpu was seen")
    kept = {change.name: change for change in report.changes}
    assert kept["TPU_SKIP_MDS_QUERY"].outcome == "kept"
    assert kept["TPU_SKIP_MDS_QUERY"].why.startswith("you set it")


@pytest.mark.parametrize(("kind", "hint"), [("tpu", "tpukit[tpu]"), ("gpu", "jax[cuda13]")])
def test_a_chip_without_its_plugin_is_a_cpu_machine_and_says_why(machine, kind, hint):
    machine(kind, installed=())
    report = configure_tpu_environment(environment={})
    assert report.platform == "cpu"
    assert hint in report.evidence[-1]


def test_a_platform_can_be_asked_for():
    environment = {}
    report = configure_tpu_environment(environment=environment, platform="tpu")
    assert environment == {"JAX_PLATFORMS": "tpu,cpu"}
    assert report.evidence == ("you asked for it",)
    with pytest.raises(ConfigError, match=r"'tpus'; it must be 'tpu', 'gpu' or 'cpu'.*mean 'tpu'"):
        configure_tpu_environment(environment={}, platform="tpus")


def test_the_documents_allocator_settings_are_there_for_who_asks():
    settings = environment_for("gpu", allocator="platform", preallocate=False)
    assert settings["XLA_PYTHON_CLIENT_ALLOCATOR"].value == "platform"
    assert settings["XLA_PYTHON_CLIENT_PREALLOCATE"].value == "false"
    assert "XLA_PYTHON_CLIENT_ALLOCATOR" not in environment_for("gpu")


def test_report_for_people_and_machines(machine):
    machine("cpu")
    report = configure_tpu_environment(environment={"JAX_PLATFORMS": "[red]cpu"})
    assert json.loads(json.dumps(report.to_dict()))["platform"] == "cpu"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "[red]cpu" in text, "values are shown as they are, not read as markup"
    assert "kept" in text


def run_python(code):
    """Run code in a fresh process whose environment says nothing about platforms."""
    keep = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=keep, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_before_jax_it_decides_the_platform_and_never_loads_libtpu():
    seen = run_python(
        "import json, sys; from tpukit.runtime.environment import configure_tpu_environment\n"
        "report = configure_tpu_environment(platform='cpu')\n"
        "jax_was_loaded = 'jax' in sys.modules\n"
        "import jax; devices = jax.devices()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(json.dumps([report.to_dict(), jax_was_loaded, devices[0].platform, "
        "'libtpu.so' in maps]))"
    )
    report, jax_was_loaded, platform, libtpu_loaded = seen
    assert report["jax_state"] == "absent"
    assert (jax_was_loaded, platform, libtpu_loaded) == (False, "cpu", False)


def test_after_import_it_still_counts_and_after_devices_it_says_too_late():
    first, platforms, second, environment = run_python(
        "import json, os, jax\n"
        "os.environ.pop('TPU_SKIP_MDS_QUERY', None)\n"
        "from tpukit.runtime.environment import configure_tpu_environment\n"
        "first = configure_tpu_environment(platform='cpu').to_dict()\n"
        "platforms = jax.config.jax_platforms; jax.devices()\n"
        "del os.environ['JAX_PLATFORMS']\n"
        "second = configure_tpu_environment(platform='cpu').to_dict()\n"
        "print(json.dumps([first, platforms, second, os.environ.get('JAX_PLATFORMS')]))"
    )
    assert first["jax_state"] == "imported"
    assert platforms == "cpu"
    assert second["jax_state"] == "initialised"
    late = {change["name"]: change for change in second["changes"]}["JAX_PLATFORMS"]
    assert late["outcome"] == "too late"
    assert late["after"] is None
    assert "call this before anything uses jax" in late["why"]
    assert environment is None


@pytest.mark.parametrize(
    "script",
    [
        "from tpukit import TPUTrainer; TPUTrainer(model='tiny', progress=False)",
        "from tpukit import create_mesh; create_mesh(mesh_shape=(1,), axis_names=('data',))",
        "from tpukit.torch import TPUBackend; TPUBackend()",
    ],
)
def test_libtpu_prints_nothing_on_a_machine_without_tpu(script):
    """The compiler's libtpu is installed here, and jax would load it to look for chips."""
    pytest.importorskip("libtpu")
    pytest.importorskip("torch")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_PLATFORMS", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "libtpu" not in done.stderr
    assert "hostname" not in done.stderr
