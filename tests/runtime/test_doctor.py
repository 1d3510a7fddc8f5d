"""The doctor on made-up machines: each trouble is seen, named and given a way out."""

import fcntl
import io
import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from tpukit.hardware.detect import detect_accelerators
from tpukit.runtime.child import ChildError
from tpukit.runtime.doctor import Diagnosis, DoctorFinding, diagnose_tpu
from tpukit.runtime.doctor import diagnosis as diagnosis_module
from tpukit.runtime.doctor.devices import LOCK_FILE
from tpukit.runtime.doctor.diagnosis import CHECKS, examine
from tpukit.runtime.doctor.finding import Site

PAIRED = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}
JAX_REQUIRES = [
    "jaxlib<=0.10.2,>=0.10.1",
    'jaxlib==0.10.1; extra == "minimum-jaxlib"',
    'libtpu==0.0.42.*; extra == "tpu"',
]
TPUKIT_REQUIRES = ["jax<0.13,>=0.10.2", 'kubernetes>=34; extra == "gke"', 'ruff; extra == "dev"']


@pytest.fixture
def root(tmp_path):
    """An empty file system that shares the real process table."""
    for folder in ("dev", "tmp", "sys"):
        (tmp_path / folder).mkdir()
    (tmp_path / "proc").symlink_to("/proc")
    return tmp_path


def add_tpu(root, *, chips=4, device="0x006f"):
    for chip in range(chips):
        folder = root / f"sys/bus/pci/devices/0000:00:0{chip}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{device}\n")


def site(root, environment=None, *, packages=PAIRED, requires=None, deep=False):
    environment = environment or {}
    needs = {"jax": JAX_REQUIRES, "tpukit": TPUKIT_REQUIRES, **(requires or {})}
    return Site(
        environment=environment,
        here=detect_accelerators(root=root, environment=environment),
        root=root,
        deep=deep,
        version_of=packages.get,
        requirements_of=lambda name: needs.get(name, []),
    )


def found(topic, of):
    """The findings of one topic on a site, by id; ids are unique in these tests."""
    return {
        finding.id: finding
        for check in CHECKS[topic]
        if check.__name__ != "check_jax_devices"  # starts a child; has its own test
        for finding in check(of)
    }


def test_a_good_machine_is_healthy(root):
    diagnosis = examine(site(root))
    assert diagnosis.healthy
    assert not diagnosis.of("warning")
    assert diagnosis["summary"].startswith("healthy: no TPU here, ")
    assert diagnosis["summary"].endswith("0 errors, 0 warnings")


def test_the_summary_says_that_there_is_a_tpu(root):
    add_tpu(root)
    machine = site(root, {"JAX_PLATFORMS": "cpu"})
    has_tpu = machine.here.kind == "tpu"
    assert Diagnosis(str(machine.here), (), has_tpu=has_tpu).summary.startswith(
        "healthy: a TPU is here, 4 TPU chips"
    )


@pytest.mark.parametrize(
    ("variable", "name", "kept"),
    [
        ("COLAB_RELEASE_TAG", "Google Colab", "/content is gone"),
        ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle", "only /kaggle/working is kept"),
    ],
)
def test_hosted_notebooks_are_known(root, variable, name, kept):
    finding = found("environment", site(root, {variable: "x"}))["notebook"]
    assert name in finding.seen
    assert kept in finding.seen
    assert "Accelerator" in finding.fix or "Runtime" in finding.fix
    add_tpu(root)
    assert found("environment", site(root, {variable: "x"}))["notebook"].fix is None
    assert "notebook" not in found("environment", site(root))


@pytest.mark.parametrize(
    ("packages", "id_", "severity", "seen", "fix"),
    [
        ({"libtpu": "0.0.51"}, "libtpu", "error", "pins libtpu==0.0.42.*", "jax[tpu]==0.10.2"),
        ({"libtpu": None}, "libtpu", "warning", "nothing can be compiled", "tpukit[tpu]"),
        ({"libtpu": "0.0.42.dev2"}, "libtpu", "ok", "0.0.42.dev2", None),
        ({"jax": None}, "jax", "error", "jax is not installed", "pip install tpukit"),
        ({"jax": "0.9.1"}, "jax", "error", "made for jax<0.13,>=0.10.2", "pip install 'jax<0.13"),
        ({"jaxlib": "0.9.0"}, "jax", "error", "needs jaxlib<=0.10.2", "pip install 'jaxlib<="),
        ({"libtpu-nightly": "1"}, "libtpu_nightly", "error", "overwrites", "pip uninstall"),
        ({"kubernetes": "34.1"}, "extras", "ok", "extras installed: gke", None),
        ({}, "extras", "info", "not installed: gke (kubernetes)", "tpukit[gke]"),
    ],
)
def test_software(root, packages, id_, severity, seen, fix):
    finding = found("software", site(root, packages={**PAIRED, **packages}))[id_]
    assert finding.severity == severity
    assert seen in finding.seen
    assert fix is None or fix in finding.fix


def test_extras_are_unknown_without_an_installation(root):
    finding = found("software", site(root, requires={"tpukit": []}))["extras"]
    assert "not known" in finding.seen


def test_a_tpu_without_libtpu_is_an_error(root):
    add_tpu(root)
    assert found("software", site(root, packages={"jax": "1"}))["libtpu"].severity == "error"


@pytest.mark.parametrize(
    ("plugins", "severity"),
    [
        ({}, "warning"),
        ({"jax-cuda13-plugin": "0.10.2"}, "ok"),
        ({"jax-cuda12-plugin": "0.9"}, "warning"),
    ],
)
def test_a_gpu_needs_the_plugin_of_its_jaxlib(root, plugins, severity):
    (root / "dev/nvidia0").touch()
    finding = found("software", site(root, packages={**PAIRED, **plugins}))["cuda_plugin"]
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("tpu", "environment", "id_", "severity", "seen"),
    [
        (False, {"JAX_PLATFORMS": "tpu"}, "jax_platforms", "error", "no TPU here"),
        (False, {"JAX_PLATFORMS": "cuda,cpu"}, "jax_platforms", "error", "no GPU here"),
        (False, {"JAX_PLATFORMS": "tpuu"}, "jax_platforms", "warning", "no platform tpuu"),
        (True, {"JAX_PLATFORMS": "cpu"}, "jax_platforms", "warning", "the TPU here stays idle"),
        (True, {"JAX_PLATFORMS": "tpu,cpu"}, "jax_platforms", "ok", "JAX_PLATFORMS=tpu,cpu"),
        (
            False,
            {"XLA_FLAGS": "--xla_tpu_enable_megacore_fusion=true"},
            "tpu_flag_in_xla_flags",
            "error",
            "xla_tpu_enable_megacore_fusion",
        ),
        (
            False,
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            "virtual_devices",
            "info",
            "virtual CPU devices",
        ),
        (False, {"XLA_FLAGS": "xla_dump_to=/x"}, "flag_syntax", "error", "XLA_FLAGS: 'xla_dump"),
        (False, {"MEGASCALE_SLICE_ID": "1"}, "megascale_leftovers", "warning", "left over"),
        (True, {"MEGASCALE_SLICE_ID": "1"}, "half_set", "warning", "without MEGASCALE_COORD"),
        (True, {"MEGASCALE_PORT": "8080"}, "megascale", "info", "MEGASCALE_PORT"),
        (False, {"TPU_PROCESS_BOUNDS": "1,1,1"}, "half_set", "warning", "TPU_CHIPS_PER_PROCESS"),
        (False, {"TPUKIT_HOST_ID": "1"}, "half_set", "warning", "TPUKIT_NUM_HOSTS"),
        (True, {"TPU_WORKER_ID": "1"}, "worker_id", "error", "names no hosts"),
        (True, {"TPU_WORKER_HOSTNAMES": "a,b"}, "worker_id", "error", "not set"),
        (
            True,
            {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b"},
            "worker_id",
            "error",
            "TPU_WORKER_ID is 2 and TPU_WORKER_HOSTNAMES names 2 hosts",
        ),
        (False, {"TPU_ACCELERATOR_TYPE": "v6e-7"}, "accelerator_type", "warning", "v6e-7"),
        (False, {"TPU_LIBRARY_PATH": "/no/such"}, "missing_file", "error", "/no/such"),
        (False, {"GOOGLE_APPLICATION_CREDENTIALS": "/no"}, "missing_file", "error", "/no"),
        (False, {"http_proxy": "http://p:1"}, "proxy", "info", "even loopback"),
    ],
)
def test_environment(root, tpu, environment, id_, severity, seen):
    if tpu:
        add_tpu(root)
    finding = found("environment", site(root, environment))[id_]
    assert finding.severity == severity
    assert seen in finding.seen


def test_one_host_needs_no_worker_id(root):
    assert "worker_id" not in found(
        "environment", site(root, {"TPU_WORKER_HOSTNAMES": "localhost"})
    )


def test_flags_are_not_looked_up_unasked(root, monkeypatch, tmp_path):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "empty"))
    finding = found("environment", site(root, {"XLA_FLAGS": "--xla_no_such_flag=1"}))["flags"]
    assert finding.severity == "info"
    assert finding.fix == "tpukit flags check"


def test_unknown_flags_are_found_when_the_registry_is_there(root, monkeypatch):
    from tpukit.runtime.doctor import variables
    from tpukit.runtime.flags import Flag, FlagRegistry

    registry = FlagRegistry(
        [Flag(name="xla_tpu_enable_x", parsers=("libtpu",), type="bool")],
        jaxlib_version="1",
        libtpu_version="2",
    )
    monkeypatch.setattr(variables.FlagRegistry, "installed", lambda: registry)
    good = {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_x --noxla_tpu_enable_x"}
    assert found("environment", site(root, good, deep=True))["flags"].severity == "ok"
    bad = {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_y=1"}
    finding = found("environment", site(root, bad, deep=True))["unknown_flag"]
    assert finding.severity == "error"
    assert "LIBTPU_INIT_ARGS holds --xla_tpu_enable_y" in finding.seen


def test_flags_that_cannot_be_looked_up_are_a_warning(root, monkeypatch):
    from tpukit.runtime.doctor import variables

    def fail():
        raise ChildError("the probe died", kind="exit")

    monkeypatch.setattr(variables.FlagRegistry, "installed", fail)
    finding = found("environment", site(root, {"XLA_FLAGS": "--xla_x=1"}, deep=True))["flags"]
    assert finding.severity == "warning"
    assert "the probe died" in finding.seen


def test_a_lock_file_held_by_a_live_process_names_it(root):
    path = root / LOCK_FILE
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "sys.stdout.write('locked\\n'); sys.stdout.flush(); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        finding = found("devices", site(root))["lock_file"]
        assert finding.severity == "info"
        assert f"process {holder.pid} of " in finding.seen
        add_tpu(root)
        assert found("devices", site(root))["lock_file"].severity == "warning"
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert "does no harm" in found("devices", site(root))["lock_file"].seen


def test_looking_at_the_lock_does_not_release_our_own(root):
    path = root / LOCK_FILE
    with path.open("w") as ours:
        fcntl.lockf(ours, fcntl.LOCK_EX)
        assert f"process {os.getpid()} of " in found("devices", site(root))["lock_file"].seen
        code = (
            "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )
    assert "BlockingIOError" in other.stderr


def deny_access(monkeypatch, *paths):
    real = os.access
    denied = set(map(str, paths))
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) not in denied and real(path, mode)
    )


def test_a_lock_file_of_another_user_is_an_error(root, monkeypatch):
    (root / LOCK_FILE).touch()
    deny_access(monkeypatch, root / LOCK_FILE)
    finding = found("devices", site(root))["lock_file"]
    assert finding.severity == "error"
    assert finding.fix == "sudo rm /tmp/libtpu_lockfile"


def test_who_holds_the_chip(root):
    node = root / "dev/accel0"
    node.touch()
    code = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(node)], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        finding = found("devices", site(root))["chip_holder"]
        assert f"process {holder.pid} of " in finding.seen
        assert finding.fix.endswith(f"kill {holder.pid}")
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_devices_that_may_not_be_opened(root, monkeypatch):
    add_tpu(root)
    (root / "dev/vfio").mkdir()
    (root / "dev/vfio/0").touch()
    deny_access(monkeypatch, root / "dev/vfio/0")
    assert found("devices", site(root))["device_permissions"].severity == "error"


@pytest.mark.parametrize(
    ("device", "state", "severity"),
    [
        ("0x006f", "[always] madvise never", "ok"),
        ("0x006f", "always [madvise] never", "warning"),
        ("0x005e", "always [madvise] never", None),
    ],
    ids=["v6e on", "v6e off", "v4 needs none"],
)
def test_huge_pages(root, device, state, severity):
    add_tpu(root, device=device)
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    path.parent.mkdir(parents=True)
    path.write_text(state)
    finding = found("devices", site(root)).get("huge_pages")
    assert (finding and finding.severity) == severity


def test_jax_is_asked_in_a_child_where_a_chip_is(root):
    add_tpu(root)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    (finding,) = CHECKS["devices"][-1](site(root, environment))
    assert finding.severity == "warning"
    assert "8 x cpu" in finding.seen
    assert "though this is a TPU machine" in finding.seen


def test_jax_that_cannot_open_the_devices_is_an_error(root):
    add_tpu(root)
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    (finding,) = CHECKS["devices"][-1](site(root, environment))
    assert finding.severity == "error"
    assert "nonsense" in finding.seen


def test_resources(root, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(cache / "deeper"))
    limit = root / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    good = found("resources", site(root))
    assert {finding.severity for finding in good.values()} == {"ok"}
    assert str(cache / "deeper") in good["disk"].seen

    limit.write_text(f"{200 * 2**20}\n")
    memory = found("resources", site(root))["memory"]
    assert memory.severity == "warning"
    assert "container may use 0.2 GiB" in memory.seen

    deny_access(monkeypatch, tmp_path)
    disk = found("resources", site(root))["disk"]
    assert disk.severity == "error"
    assert "TPUKIT_CACHE_DIR" in disk.fix


def test_logs_of_libtpu(root, monkeypatch):
    logs = root / "tmp/tpu_logs"
    logs.mkdir()
    (logs / "small").write_text("x")
    (logs / "dangling").symlink_to("nowhere")
    assert "libtpu_logs" not in found("resources", site(root))
    with (logs / "large").open("w") as large:
        large.truncate(2 * 2**30)  # sparse: takes no room
    assert "2.0 GiB" in found("resources", site(root))["libtpu_logs"].seen
    deny_access(monkeypatch, logs)
    assert "another user" in found("resources", site(root))["libtpu_logs"].seen


def test_network_mode(root):
    assert "off" in found("resources", site(root, {"TPU_SKIP_MDS_QUERY": "1"}))["network_mode"].seen
    add_tpu(root)
    blind = found("resources", site(root, {"TPU_SKIP_MDS_QUERY": "1", "NO_GCE_CHECK": "true"}))
    assert blind["network_mode"].severity == "warning"
    assert blind["credentials_mode"].severity == "warning"
    assert "network_mode" not in found("resources", site(root))


def test_a_check_that_cannot_look_costs_only_itself(root, monkeypatch):
    def check_secret(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        diagnosis_module, "CHECKS", {"devices": (check_secret, *CHECKS["devices"][:1])}
    )
    first, second = examine(site(root)).findings
    assert first.id == "secret"
    assert first.severity == "warning"
    assert "Permission denied" in first.seen
    assert second.id == "accelerators"


def test_a_warning_without_a_way_out_is_refused():
    with pytest.raises(ValueError, match="'x' is a warning but has no fix"):
        DoctorFinding("x", "devices", "warning", "something")


def test_diagnosis_reads_like_a_mapping_and_renders():
    findings = (
        DoctorFinding("a", "software", "ok", "good [red]thing"),
        DoctorFinding("b", "devices", "error", "bad thing", "mend it"),
    )
    diagnosis = Diagnosis("2 CPUs", findings)
    assert diagnosis["summary"] == "not healthy: no TPU here, 2 CPUs; 1 error, 0 warnings"
    assert set(diagnosis) == {"summary", "healthy", "machine", "has_tpu", "findings"}
    assert dict(diagnosis) == diagnosis.to_dict()
    assert json.loads(json.dumps(diagnosis.to_dict()))["findings"][1]["fix"] == "mend it"
    with pytest.raises(KeyError):
        diagnosis["nothing"]
    console = Console(width=80, file=io.StringIO())
    console.print(diagnosis)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == [
        "software",
        "✓ ok      good [red]thing",
        "",
        "devices",
        "✗ error   bad thing",
        "          → mend it",
        "",
        "not healthy: no TPU here, 2 CPUs; 1 error, 0 warnings",
    ]


def test_every_check_explains_itself():
    for checks in CHECKS.values():
        for check in checks:
            assert check.__doc__, check.__name__
            assert check.__name__.startswith("check_")


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_the_deep_check_compiles_for_real(root):
    (finding,) = CHECKS["compiler"][0](site(root, deep=True))
    assert finding.severity == "ok"
    assert "4 x TPU v6 lite" in finding.seen


def test_this_machine_in_a_fresh_process_without_loading_jax(tmp_path):
    code = (
        "import json, sys; from tpukit.runtime.doctor import diagnose_tpu; d = diagnose_tpu()\n"
        "print(json.dumps([d.to_dict(), 'jax' in sys.modules]))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    seen, jax_loaded = json.loads(result.stdout)
    assert not jax_loaded
    assert time.monotonic() - started < 20
    assert seen["machine"] == str(detect_accelerators(environment={}))


def test_diagnose_takes_another_root_and_environment(root):
    diagnosis = diagnose_tpu(root=root, environment={"JAX_PLATFORMS": "tpu"})
    assert not diagnosis.healthy
    assert "jax_platforms" in {finding.id for finding in diagnosis.of("error")}
