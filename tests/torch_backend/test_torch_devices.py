"""Devices: what is found without a TPU, under strict validation, and beside torch_tpu."""

import logging
import os
import subprocess
import sys

import jax
import pytest

from tpukit.errors import TPUNotAvailableError
from tpukit.torch import KernelPyTorchConfig, XLADeviceManager, detect_torch_tpu, find_device


def test_without_a_tpu_it_says_so_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING, "tpukit"):
        manager = XLADeviceManager(KernelPyTorchConfig().hardware.tpu)
    assert "No TPU here" in caplog.text
    assert "models run on CPU" in caplog.text
    assert manager.kind == "cpu"
    assert manager.device == jax.local_devices()[0]
    assert manager.devices == jax.devices()
    assert manager.local_devices == jax.local_devices()
    assert (manager.world_size, manager.rank, manager.is_distributed) == (1, 0, False)
    assert "8 cpu devices" in repr(manager)


def test_strict_validation_refuses_to_go_on():
    config = KernelPyTorchConfig("development", enable_strict_validation=True)
    with pytest.raises(TPUNotAvailableError, match="enable_strict_validation = False"):
        XLADeviceManager(config)
    with pytest.raises(TPUNotAvailableError, match="No TPU here"):
        find_device(config.hardware.tpu)


def test_a_tpu_is_taken_without_a_word(monkeypatch, caplog):
    class Chip:
        platform = "tpu"
        device_kind = "TPU v6 lite"

    monkeypatch.setattr(jax, "local_devices", lambda: [Chip()])
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    config = KernelPyTorchConfig(enable_strict_validation=True)
    with caplog.at_level(logging.WARNING, "tpukit"):
        found = find_device(config.hardware.tpu)
    assert found.kind == "tpu"
    assert not caplog.text


def test_a_platform_that_is_not_there_is_named(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(TPUNotAvailableError, match="JAX_PLATFORMS"):
        XLADeviceManager()


def test_torch_tpu_is_not_here():
    found = detect_torch_tpu()
    assert not found.installed
    assert found.version is None
    assert found.runs_on == "torchax"
    assert "not installed" in found.advice


def python(code, *, path="", **environment):
    known = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": known, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


CLASH = """
import torch
torch.utils.rename_privateuse1_backend("tpu")
from tpukit.errors import TPUNotAvailableError
from tpukit.models.adapters.torch_module.environment import environment
from tpukit.torch import XLADeviceManager

found = XLADeviceManager().torch_tpu
print(found.registered, found.runs_on)
print(found.advice)
try:
    environment()
except TPUNotAvailableError as error:
    print("refused:", error)
print(torch.ones(2).sum().item())
"""

INSTALLED = """
from tpukit.torch import detect_torch_tpu

import sys
import tpukit.torch.devices as devices

found = detect_torch_tpu()
print(found.installed, found.runs_on, "torch_tpu" in sys.modules)
print(found.advice)
devices.detect_accelerators = lambda: type("Found", (), {"kind": "tpu"})
print(detect_torch_tpu().advice)
"""


def test_the_clash_is_explained_and_torch_still_works():
    ran = python(CLASH)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "True torch_tpu"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in lines[1]
    assert lines[2].startswith("refused: torch's custom device is taken by 'tpu'")
    assert "write_handover" in lines[2]
    assert lines[3] == "2.0"


def test_an_installed_torch_tpu_is_seen_and_not_imported(tmp_path):
    # Importing it without libtpu ends the process, which the fake shows by raising.
    (tmp_path / "torch_tpu.py").write_text("raise SystemExit('imported')")
    ran = python(INSTALLED, path=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ran.returncode == 0, ran.stderr
    first, alone, on_tpu = ran.stdout.splitlines()
    assert first == "True torchax False"
    assert "needs a TPU" in alone
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set" in on_tpu
