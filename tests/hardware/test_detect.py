"""Detection against made-up machines: what the kernel shows decides, nothing is waited for."""

import json
import sys
import time
from subprocess import run

import pytest

from tpukit.hardware import detect_accelerators

TPU_IDS = {"v3": "0x0027", "v4": "0x005e", "v5p": "0x0062", "v5e": "0x0063", "v6e": "0x006f"}


def machine(root, pci=(), nodes=()):
    for number, (vendor, device) in enumerate(pci):
        folder = root / "sys/bus/pci/devices" / f"0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    for node in nodes:
        path = root / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.mark.parametrize(("generation", "device"), TPU_IDS.items())
def test_tpus_on_the_pci_bus(tmp_path, generation, device):
    root = machine(tmp_path, pci=[("0x1ae0", device)] * 4 + [("0x1ae0", "0x0042")])
    found = detect_accelerators(root=root, environment={})
    assert (found.kind, found.count, found.generation) == ("tpu", 4, generation)
    assert found.slice_name is None
    assert "PCI bus" in found.evidence[0]


def test_the_network_card_of_every_cloud_machine_is_no_tpu(tmp_path):
    root = machine(tmp_path, pci=[("0x1ae0", "0x0042"), ("0x8086", "0x1237")])
    assert detect_accelerators(root=root, environment={}).kind == "cpu"


def test_the_slice_comes_from_the_environment(tmp_path):
    root = machine(tmp_path, nodes=["dev/accel0", "dev/accel1", "dev/accel2", "dev/accel3"])
    found = detect_accelerators(root=root, environment={"TPU_ACCELERATOR_TYPE": "v5litepod-16"})
    assert (found.kind, found.count, found.generation, found.slice_name) == (
        "tpu",
        4,
        "v5e",
        "v5e-16",
    )
    assert str(found) == "4 TPU chips (v5e), part of v5e-16"
    strange = detect_accelerators(root=root, environment={"TPU_ACCELERATOR_TYPE": "v99-1"})
    assert (strange.kind, strange.generation, strange.slice_name) == ("tpu", None, None)
    assert "names no slice" in strange.evidence[-1]


def test_vfio_groups_are_tpus_only_on_a_tpu_machine(tmp_path):
    root = machine(tmp_path, nodes=["dev/vfio/0", "dev/vfio/1", "dev/vfio/vfio"])
    assert detect_accelerators(root=root, environment={}).kind == "cpu"
    found = detect_accelerators(root=root, environment={"TPU_WORKER_ID": "0"})
    assert (found.kind, found.count) == ("tpu", 2)


@pytest.mark.parametrize(
    "nodes",
    [
        ["proc/driver/nvidia/gpus/0000:01:00.0", "proc/driver/nvidia/gpus/0000:02:00.0"],
        ["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"],
    ],
)
def test_nvidia_gpus(tmp_path, nodes):
    found = detect_accelerators(root=machine(tmp_path, nodes=nodes), environment={})
    assert (found.kind, found.count) == ("gpu", 2)
    assert str(found) == "2 NVIDIA GPUs"


def test_an_accelerator_type_without_a_chip_is_not_believed(tmp_path):
    """Offline compiles set this variable on machines that have no TPU."""
    found = detect_accelerators(root=tmp_path, environment={"TPU_ACCELERATOR_TYPE": "v6e-4"})
    assert found.kind == "cpu"
    assert found.count >= 1


def test_this_machine_is_told_at_once_and_without_jax():
    start = time.monotonic()
    found = detect_accelerators()
    assert time.monotonic() - start < 10  # a question to a metadata server takes longer
    json.dumps(found.to_dict())
    code = (
        "import sys, tpukit.hardware as h; h.detect_accelerators(); assert 'jax' not in sys.modules"
    )
    assert (
        run(
            [sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}
        ).returncode
        == 0
    )
