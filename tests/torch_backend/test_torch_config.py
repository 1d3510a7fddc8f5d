"""Document 002's configuration, on the values of `TPUConfig`."""

import pytest

from tpukit.errors import ConfigError
from tpukit.torch import KernelPyTorchConfig, TPUConfig, TPUVersion
from tpukit.torch.config import tpu_settings


def test_the_documents_names_and_ours_are_one_value():
    tpu = KernelPyTorchConfig().hardware.tpu
    tpu.version = TPUVersion.V5P
    tpu.mixed_precision = False
    assert (tpu.tpu_version, tpu.use_mixed_precision) == ("v5p", False)
    tpu.tpu_version = "v6e"
    assert tpu.version == "v6e"


def test_modes_are_presets():
    assert KernelPyTorchConfig("inference").hardware.tpu.gradient_checkpointing is False
    assert KernelPyTorchConfig("training").hardware.tpu.gradient_checkpointing is True
    assert KernelPyTorchConfig("development").hardware.tpu.enable_strict_validation is True


@pytest.mark.parametrize(
    ("version", "field", "gib"), [("v6e", "v6e_memory_gb", 24.0), ("v7", "v7_memory_gb", 128.0)]
)
def test_a_capacity_limits_only_its_own_chip(version, field, gib):
    tpu = KernelPyTorchConfig(version=version, **{field: gib}).hardware.tpu
    assert tpu.resolved().memory_per_chip == gib * 2**30
    tpu.version = "v5p"
    assert tpu.resolved().memory_per_chip is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verson": "v6e"}, "Did you mean 'version'"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
        ({"v6e_memory_gb": -1.0}, "v6e_memory_gb"),
        ({"version": "v9"}, "v9"),
    ],
)
def test_a_bad_value_is_refused_and_changes_nothing(change, message):
    tpu = KernelPyTorchConfig(version="v6e").hardware.tpu
    with pytest.raises(ValueError, match=message):
        tpu.update(**change)
    assert (tpu.version, tpu.memory_fraction, tpu.v6e_memory_gb) == ("v6e", 1.0, None)


def test_an_unknown_mode():
    with pytest.raises(ConfigError, match="Did you mean 'training'"):
        KernelPyTorchConfig(mode="train")


def test_either_kind_of_configuration_is_taken():
    config = TPUConfig(tpu_version="v4", memory_fraction=0.5)
    assert tpu_settings(config).memory_fraction == 0.5
    assert tpu_settings(None).gradient_checkpointing is True
    with pytest.raises(ConfigError, match="got dict"):
        tpu_settings({})
