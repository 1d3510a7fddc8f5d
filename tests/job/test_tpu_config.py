import json
import os

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tpukit.errors import ConfigError, SliceError, TPUValidationError
from tpukit.hardware.missing import Missing
from tpukit.job.config import TPUConfig, presets
from tpukit.job.precision import NARROW, in_precision
from tpukit.job.train import TrainingSettings
from tpukit.models import get_preset
from tpukit.models.transformer.config import OPERANDS
from tpukit.records.metrics import publish, withdraw


def test_document_000_basic_form():
    config = TPUConfig(tpu_version="v6e", num_chips=64, topology="8x8")
    config.validate()
    assert f"{config.tpu_version}-{config.num_chips}" == "v6e-64"
    assert f"{config.get_total_tflops():.1f}" == "58752.0"  # 64 chips of 918


def test_document_000_full_form():
    config = TPUConfig(
        # Hardware
        tpu_version="v6e",
        num_chips=64,
        topology="8x8",
        memory_per_chip="32GB",
        # Precision
        precision="bfloat16",
        use_mixed_precision=True,
        fp32_params=True,
        # Compilation
        xla_optimization_level=3,
        enable_xla_fusion=True,
        enable_async_collective=True,
        # Memory
        memory_optimization="aggressive",
        enable_rematerialization=True,
        gradient_checkpointing=True,
        # Communication
        communication_optimization=True,
        use_collective_matmul=True,
        # Monitoring
        enable_profiling=False,
        log_device_placement=False,
    )
    assert config.memory_per_chip == 32 * 10**9
    config.batch_size_per_chip = 8
    config.memory_optimization = "aggressive"
    config.mesh_shape = (4, 16)
    assert config.validate() is config


def test_document_001_form_with_the_topology_corrected():
    config = TPUConfig(
        num_chips=32,
        topology="2x4x4",
        memory_per_chip=32 * 1024**3,
        flops_per_chip=275e12,
        compute_dtype="bfloat16",
        param_dtype="float32",
    )
    assert config.chip is not None
    assert config.chip.name == "v4"  # the only chip with that peak
    assert config.get_total_tflops() == 32 * 275
    memory = config.get_memory_config()
    assert memory["use_mixed_precision"]
    assert (memory["compute_dtype"], memory["param_dtype"]) == ("bfloat16", "float32")
    assert config.get_sharding_spec((8, 16)) == PartitionSpec("data", "model")
    assert config.get_sharding_spec((8, 4, 16)) == PartitionSpec("data", None, "model")
    assert config.scaling_config.load_threshold == 0.8


def test_document_001_form_as_written_names_the_valid_shapes():
    with pytest.raises(SliceError, match="2x4x4"):
        TPUConfig(num_chips=32, topology="4x8", flops_per_chip=275e12)


def test_document_004_yaml_form():
    config = TPUConfig.from_yaml(
        """
project: "your-gcp-project"
zone: "us-central1-a"
network: "default"
accelerator_type: "v3-8"
software_version: "2.8.0"
enable_ip_alias: true
reserved: false
"""
    ).validate()
    assert config.slice is not None
    assert (config.slice.chips, config.slice.devices) == (4, 8)
    assert config.zone == "us-central1-a"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tpu_verson": "v4"}, "Did you mean 'tpu_version'"),
        ({"xla_optimization_level": 4}, "less than or equal to 3"),
        ({"precision": "bf17"}, "'bfloat16', 'float32'"),
        ({"memory_per_chip": "lots"}, "write '32GB'"),
        ({"tpu_version": "v6e", "memory_per_chip": "64GB"}, "v6e chip has 32 GiB"),
        ({"tpu_version": "v6e", "flops_per_chip": 275e12}, "peaks at 918"),
        ({"tpu_version": "v6e", "num_chips": 64, "mesh_shape": (8, 9)}, "v6e-64 has 64"),
        ({"accelerator_type": "v3-8", "tpu_version": "v6e", "num_chips": 4}, "drop one"),
        ({"tpu_version": "v9"}, "known are v2"),
        ({"num_chips": 0}, "accepted are 1 to"),
        ({"memory_fraction": 1.5}, "accepted are above 0 to 1"),
    ],
)
def test_wrong_values_are_refused_with_the_way_out(values, message):
    with pytest.raises(TPUValidationError, match=message):
        TPUConfig(**values)


def test_a_refused_assignment_changes_nothing():
    config = TPUConfig(tpu_version="v6e", num_chips=64, topology="8x8")
    with pytest.raises(SliceError, match=r"config\.update\(num_chips"):
        config.num_chips = 256
    with pytest.raises(ConfigError):
        config.xla_optimization_level = 9
    assert config == TPUConfig(tpu_version="v6e", num_chips=64, topology="8x8")
    config.update(num_chips=256, topology="16x16")
    assert config.get_total_tflops() == 256 * 918
    assert str(config.origin_of("num_chips")) == "assigned"


def test_validate_refuses_a_configuration_without_a_slice():
    with pytest.raises(ConfigError, match="names no slice"):
        TPUConfig(tpu_version="v5e").validate()
    with pytest.raises(ConfigError, match="needs num_chips"):
        TPUConfig(tpu_version="v5e").get_total_tflops()


def test_performance_is_peak_until_something_was_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no runs
    config = TPUConfig(tpu_version="v5p", num_chips=64)
    metrics = config.get_performance_metrics()
    assert metrics["total_tflops"] == 64 * 459
    assert metrics.origins["total_tflops"] == "datasheet"
    assert not metrics["utilization"]
    assert f"{metrics['throughput_samples_s']:.1f}" == "–"
    assert metrics.to_dict()["utilization"]["value"] is None
    assert "nothing was measured" in metrics.reasons["utilization"]
    measured = config.get_performance_metrics(samples_per_s=10.0, achieved_tflops=64 * 459 / 2)
    assert measured["utilization"] == pytest.approx(0.5)
    assert measured.origins["throughput_samples_s"] == "measured"
    assert isinstance(TPUConfig().get_performance_metrics()["total_tflops"], Missing)


class TestMeasured:
    CONFIG = TPUConfig(tpu_version="v6e", num_chips=64, topology="8x8")

    def write_run(self, folder, *, step_times, batch_size=32):
        folder.mkdir(parents=True)
        records = [
            {"step": step, "loss": 1.0, "step_time_s": took, "mfu": 0.2 / took, "time": 1.0}
            for step, took in enumerate(step_times, 1)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "metrics.jsonl").write_text(lines)
        identity = {"format": 1, "identity": {"batch_size": batch_size}}
        (folder / "run.json").write_text(json.dumps(identity))
        return folder

    def test_it_comes_from_the_newest_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.write_run(tmp_path / "runs" / "a", step_times=[9.0])
        os.utime(tmp_path / "runs" / "a" / "metrics.jsonl", (1, 1))
        self.write_run(tmp_path / "runs" / "b", step_times=[0.5, 0.5, 99.0])
        metrics = self.CONFIG.get_performance_metrics()
        assert metrics["utilization"] == pytest.approx(0.4), "one slow step does not count"
        assert metrics["throughput_samples_s"] == 64.0
        assert metrics.origins["utilization"] == "measured"
        assert metrics.sources["utilization"] == "runs/b, the 3 steps to step 3"

    def test_a_run_that_is_given_counts_before_any(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.write_run(tmp_path / "runs" / "b", step_times=[0.5])
        other = self.write_run(tmp_path / "elsewhere", step_times=[1.0])
        metrics = self.CONFIG.get_performance_metrics(run_dir=other)
        assert metrics["throughput_samples_s"] == 32.0
        gone = self.CONFIG.get_performance_metrics(run_dir=tmp_path / "none")
        assert "cannot be read" in gone.reasons["utilization"]

    def test_the_running_monitor_counts_before_the_newest_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.write_run(tmp_path / "runs" / "b", step_times=[0.5])
        offered = {"mfu": 0.61, "samples_per_s": 700.0}

        def provider():
            return offered

        publish(provider)
        try:
            metrics = self.CONFIG.get_performance_metrics()
            assert (metrics["utilization"], metrics["throughput_samples_s"]) == (0.61, 700.0)
            assert metrics.sources["utilization"] == "the running monitor"
            offered.update(mfu=Missing("no run"), samples_per_s=Missing("no run"))
            assert self.CONFIG.get_performance_metrics()["throughput_samples_s"] == 64.0
        finally:
            withdraw(provider)
        assert self.CONFIG.get_performance_metrics().sources["utilization"] == ("runs/b, step 1")

    def test_the_documents_block_prints_measured_or_dashes(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        def block(perf_metrics):
            return [
                f"Total TFLOPS: {perf_metrics['total_tflops']:.1f}",
                f"Memory bandwidth: {perf_metrics['memory_bandwidth_gb_s']:.1f}GB/s",
                f"Interconnect bandwidth: {perf_metrics['interconnect_bandwidth_gb_s']:.1f}GB/s",
                f"Utilization: {perf_metrics['utilization']:.1%}",
                f"Samples/sec: {perf_metrics['throughput_samples_s']:.1f}",
            ]

        peaks = ["Total TFLOPS: 58752.0", "Memory bandwidth: 1638.0GB/s"]
        shown = block(self.CONFIG.get_performance_metrics())
        assert shown[:2] == peaks
        assert shown[3:] == ["Utilization: –", "Samples/sec: –"]
        self.write_run(tmp_path / "runs" / "b", step_times=[0.5])
        shown = block(self.CONFIG.get_performance_metrics())
        assert shown[3:] == ["Utilization: 40.0%", "Samples/sec: 64.0"]


def test_memory_config_follows_the_compiler_s_limit():
    planned = TPUConfig(tpu_version="v6e", memory_fraction=0.5).get_memory_config()
    assert planned.memory_per_chip_bytes is not None
    assert 31 * 2**30 < planned.memory_per_chip_bytes < 32 * 2**30
    assert planned.planned_bytes == planned.memory_per_chip_bytes // 2
    pure = TPUConfig(precision="float32").get_memory_config()
    assert (pure.compute_dtype, pure.param_dtype) == ("float32", "float32")
    narrow = TPUConfig(fp32_params=False).get_memory_config()
    assert (narrow.compute_dtype, narrow.param_dtype) == ("bfloat16", "bfloat16")


def test_formats_go_by_any_name():
    config = TPUConfig(precision="fp8", compute_dtype="half", param_dtype="BF16")
    assert (config.precision, config.compute_dtype) == ("float8", "float16")
    assert config.param_dtype == "bfloat16"
    compute = [
        TPUConfig(precision=name).get_memory_config().compute_dtype
        for name in ("bf16", "mixed", "f32", "float8", "float8_static", "int8")
    ]
    assert compute == ["bfloat16", "bfloat16", "float32", *["float8_e4m3fn"] * 2, "int8"]
    settings = TrainingSettings(moment_dtype="bf16", precision="fp8")
    assert (settings.moment_dtype, settings.precision) == ("bfloat16", "float8")


def test_eight_bits_are_for_products_alone():
    assert set(NARROW) < set(OPERANDS)
    for name, activations in (("int8", "bfloat16"), ("float8", "bfloat16"), ("float32", "float32")):
        assert in_precision(get_preset("tiny"), name, None).model.dtype == activations


@pytest.mark.parametrize("name", ["training", "inference", "development"])
def test_presets_load_and_say_so(name):
    config = TPUConfig.preset(name)
    for field, value in presets()[name].items():
        assert getattr(config, field) == value
        assert str(config.origin_of(field)) == f"preset {name}"


def test_development_preset_is_strict_and_unoptimized():
    config = TPUConfig.preset("development", num_chips=4)
    assert config.enable_strict_validation
    assert config.xla_optimization_level == 0
    with pytest.raises(ConfigError, match="Did you mean 'training'"):
        TPUConfig.preset("trainin")


def test_environment_of_a_tpu_job():
    config = TPUConfig(tpu_version="v5p", num_chips=8, xla_optimization_level=2)
    environment: dict[str, str] = {}
    report = config.setup_environment_variables(environment, platform="tpu")
    assert report.platform == "tpu"
    assert environment["JAX_PLATFORMS"].startswith("tpu")
    assert "--xla_tpu_" in environment["LIBTPU_INIT_ARGS"]
    assert "xla_tpu_" not in environment.get("XLA_FLAGS", "")  # jaxlib would abort on it
    assert environment["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_environment_off_a_tpu_sets_what_libtpu_reads_and_no_other():
    environment: dict[str, str] = {}
    config = TPUConfig(tpu_version="v6e", xla_optimization_level=2)
    report = config.setup_environment_variables(environment, platform="cpu")
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert "--xla_tpu_" in environment["LIBTPU_INIT_ARGS"]
    assert "XLA_FLAGS" not in environment
    made = {change.name: change for change in report.changes}
    assert {"JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "LIBTPU_INIT_ARGS"} <= set(made)
    assert made["LIBTPU_INIT_ARGS"].after == environment["LIBTPU_INIT_ARGS"]
    assert "nothing but libtpu reads" in made["LIBTPU_INIT_ARGS"].why


def test_environment_of_level_0_says_why_there_are_no_flags():
    environment: dict[str, str] = {}
    report = TPUConfig(tpu_version="v6e").setup_environment_variables(environment, platform="cpu")
    assert "LIBTPU_INIT_ARGS" not in environment
    (kept,) = [change for change in report.changes if change.name == "LIBTPU_INIT_ARGS"]
    assert (kept.outcome, kept.why) == ("kept", "level 0 sets no flags")


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("version", [None, "v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"])
def test_every_level_above_0_sets_what_libtpu_reads(version, level):
    environment: dict[str, str] = {}
    config = TPUConfig(tpu_version=version, xla_optimization_level=level)
    report = config.setup_environment_variables(environment, platform="cpu")
    assert "--xla_tpu_enable_latency_hiding_scheduler=true" in environment["LIBTPU_INIT_ARGS"]
    assert "LIBTPU_INIT_ARGS" in {change.name for change in report.changes}


def test_asynchronous_collectives_show_in_the_flags():
    found = {}
    for switch in (True, False):
        config = TPUConfig(xla_optimization_level=1, enable_async_collective=switch)
        config.setup_environment_variables(environment := {}, platform="cpu")
        found[switch] = "async_collective" in environment["LIBTPU_INIT_ARGS"]
    assert found == {True: True, False: False}


def test_flags_are_not_set_once_jax_has_started(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    jax.devices()
    config = TPUConfig(tpu_version="v6e", xla_optimization_level=2)
    report = config.setup_environment_variables()
    assert "LIBTPU_INIT_ARGS" not in os.environ
    assert "LIBTPU_INIT_ARGS" in {change.name for change in report.too_late}


def test_debugging_mode_finds_a_nan_and_can_be_left():
    config = TPUConfig()
    with config.enable_debugging_mode():
        assert jax.config.jax_disable_jit
        with pytest.raises(FloatingPointError):
            jnp.log(jnp.array(-1.0))
    assert not jax.config.jax_disable_jit
    assert not jax.config.jax_debug_nans
    assert jnp.isnan(jnp.log(jnp.array(-1.0)))


@example({"project": "\x85"})  # ends a line in YAML
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "memory_per_chip": st.integers(1, 15 * 10**9),
            "precision": st.sampled_from(["bfloat16", "float32", "mixed", "float8_static", "int8"]),
            "xla_optimization_level": st.integers(0, 3),
            "memory_fraction": st.floats(0.01, 1.0),
            "project": st.text(),
            "mesh_shape": st.tuples(st.integers(1, 8), st.integers(1, 8)),
            "reserved": st.booleans(),
            "tpu_version": st.sampled_from(["v2", "v4", "v5e", "v6e", "7x"]),
            "scaling_config": st.fixed_dictionaries({"load_threshold": st.floats(0.1, 1)}),
        },
    )
)
def test_yaml_round_trip(values):
    config = TPUConfig(**values)
    assert TPUConfig.from_yaml(config.to_yaml()) == config
