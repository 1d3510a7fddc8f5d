"""Every field of `TPUConfig` has an effect that can be seen."""

import jax
import numpy as np
import pytest

from tpukit.errors import ConfigError
from tpukit.job import Job, TPUConfig, build_step
from tpukit.job.compiler_flags import flags_of
from tpukit.job.config.spelling import config_of, spell_as_job
from tpukit.job.sections import SECTIONS, CloudSettings
from tpukit.training import TPUTrainer

BASE = {"tpu_version": "v6e", "num_chips": 8}
LEVEL = {"xla_optimization_level": 2}


def job_of(config):
    spelled = {one.path: one.value for one in spell_as_job(config)}
    return Job.of("tiny", sequence_length=16, **spelled)


def slice_of(config):
    return str(config.slice)


def mesh(config):
    return job_of(config).mesh_sizes


def examples(config):
    return job_of(config).examples


def limit(config):
    return job_of(config).memory_limit_bytes


def formats(config):
    model = build_step(job_of(config)).work.config
    return model.dtype, model.matmul, model.param_dtype


def remat(config):
    return str(build_step(job_of(config)).work.remat)


def flags(config):
    return flags_of(job_of(config).compile, generation="v6e")


def hot(config):
    return config.detect_hotspots(np.array([[0.1, 0.7], [0.9, 0.2]]))


# The field, a value, what it must change, and what must be set beside it to be seen.
SEEN = {
    "tpu_version": ("v5e", slice_of, {}),
    "num_chips": (16, slice_of, {}),
    "topology": ("4x4", slice_of, {"num_chips": None}),
    "num_slices": (2, slice_of, {}),
    "accelerator_type": ("v5p-16", slice_of, {"tpu_version": None, "num_chips": None}),
    "flops_per_chip": (275e12, slice_of, {"tpu_version": None, "num_chips": 8}),
    "mesh_shape": ((4, 2), mesh, {}),
    "memory_per_chip": ("16GB", limit, {}),
    "memory_fraction": (0.5, limit, {}),
    "precision": ("int8", formats, {}),
    "compute_dtype": ("float16", formats, {}),
    "param_dtype": ("bfloat16", formats, {}),
    "fp32_params": (False, formats, {}),
    "use_mixed_precision": (False, formats, {}),
    "xla_optimization_level": (3, flags, {}),
    "enable_xla_fusion": (False, flags, LEVEL),
    "enable_async_collective": (False, flags, LEVEL),
    "communication_optimization": (False, flags, LEVEL),
    "use_collective_matmul": (True, flags, {}),
    "memory_optimization": ("none", remat, {}),
    "enable_rematerialization": (True, remat, {}),
    "gradient_checkpointing": (False, remat, {}),
    "batch_size_per_chip": (4, examples, {}),
    "scaling_config": ({"load_threshold": 0.5}, hot, {}),
}
# What a run or a compile shows: `test_in_a_run` below, and tests/checker/test_check.py.
# What a pod is asked for with: tests/pods/test_manager.py. A monitor beside a run: tests/cli/.
SEEN_ELSEWHERE = {
    *CloudSettings.model_fields,
    "enable_profiling",
    "enable_monitoring",
    "monitoring_interval_seconds",
    "monitoring_duration_seconds",
    "allocation_history_retention_seconds",
    "log_device_placement",
    "enable_strict_validation",
    "compilation_timeout_seconds",
    "cache_max_size",
}


def test_no_field_is_forgotten():
    assert {*SEEN, *SEEN_ELSEWHERE} == set(TPUConfig.model_fields)


@pytest.mark.parametrize("name", SEEN)
def test_a_field_has_its_effect(name):
    value, look, beside = SEEN[name]
    whole = {**BASE, **beside}
    given = {key: one for key, one in whole.items() if one is not None and key != name}
    with_it = TPUConfig(**given, **{name: value})
    if look is slice_of:
        assert look(with_it) != str(TPUConfig(**BASE).slice)
    else:
        assert look(with_it) != look(TPUConfig(**BASE, **beside))


@pytest.fixture
def train(tmp_path):
    def run(**settings):
        trainer = TPUTrainer(
            TPUConfig(**settings),
            model="tiny",
            devices=jax.devices()[:1],
            progress=False,
            settings={"run_dir": str(tmp_path / "run"), "checkpoint_every": 0},
        )
        return trainer.train(np.arange(4000) % 64, 7, batch_size=2, sequence_length=16)

    return run


def test_in_a_run(train, tmp_path):
    train(enable_profiling=True, log_device_placement=True)
    placement = (tmp_path / "run" / "placement.txt").read_text()
    assert ".params['embed']['embedding']" in placement
    assert "1 devices" in placement
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_strict_validation_ends_a_run_before_it_starts(train, tmp_path):
    with pytest.raises(ConfigError, match="int8 is emulated on cpu"):
        train(precision="int8", enable_strict_validation=True)
    assert not (tmp_path / "run").exists()


def test_both_spellings_say_the_same():
    config = TPUConfig(
        **BASE,
        mesh_shape=(4, 2),
        precision="int8",
        batch_size_per_chip=2,
        gradient_checkpointing=True,
        xla_optimization_level=2,
        memory_fraction=0.9,
        zone="us-east5-a",
    )
    job = job_of(config)
    assert job.on == "v6e-8"
    assert (job.mesh, job.examples, job.remat) == ({"fsdp": 4, "tensor": 2}, 16, "full")
    back = config_of(job)
    for name in config.model_fields_set:
        assert getattr(back, name) == getattr(config, name), name


def test_a_file_in_either_spelling_is_read_by_both(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: tiny\non: v6e-8\nmemory_fraction: 0.9\nzone: us-east5-a\n"
        "compile:\n  xla_optimization_level: 2\ntrain:\n  precision: int8\n"
    )
    job, config = Job.from_yaml(path), TPUConfig.from_file(path)
    assert (job.launch.zone, config.zone) == ("us-east5-a", "us-east5-a")
    assert (config.tpu_version, config.num_chips, config.precision) == ("v6e", 8, "int8")
    assert config.xla_optimization_level == 2
    assert str(config.origin_of("xla_optimization_level")) == f"file {path}:6"
    flat = tmp_path / "flat.yaml"
    flat.write_text("model: tiny\ntpu_version: v6e\nnum_chips: 8\nprecision: int8\n")
    assert Job.from_yaml(flat).on == "v6e-8"
    assert Job.from_yaml(flat).train.precision == "int8"
    both = tmp_path / "both.yaml"
    both.write_text("model: tiny\non: v6e-16\ntpu_version: v6e\nnum_chips: 8\n")
    with pytest.raises(ConfigError, match=r"sets on: v6e-16, but .*sets v6e-8; keep one"):
        Job.from_yaml(both)


def test_sections_do_not_share_names():
    names = [name for section in SECTIONS for name in section.model_fields]
    assert len(names) == len(set(names))
