"""`tpukit.check`: what the command shows, in Python; and settings of a job that move its answer."""

import flax.nnx as nnx
import pytest

import tpukit
from tpukit.checker import compiling
from tpukit.checker.check import as_job
from tpukit.errors import ConfigError
from tpukit.job import Job
from tpukit.step import Workload

JOB = Job(
    model={"preset": "tiny", "n_layers": 2, "d_model": 256, "vocab_size": 4096},
    on="v6e-8",
    sequence_length=32,
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPUKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_job_is_found_in_whatever_was_given(tmp_path):
    work = Workload("tiny", batch_size=8, sequence_length=16)
    (tmp_path / "job.yaml").write_text("model: tiny\non: v6e-8\ntrain: {optimizer: lion}\n")
    assert as_job(str(tmp_path / "job.yaml"), {}).train.optimizer == "lion"
    assert as_job(JOB, {"remat": "none"}).remat == "none"
    assert as_job("tiny", {"on": "v6e-4"}).slice.devices == 4
    assert as_job(work, {"on": "v6e-8"}).examples == 8
    with pytest.raises(ConfigError, match=r"which slice\? Give on='v6e-8'"):
        as_job("tiny", {})
    with pytest.raises(ConfigError, match="Did you mean 'batch_size'"):
        as_job("tiny", {"on": "v6e-8", "bacth_size": 8})


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.last = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
class TestRealChecks:
    def test_it_gives_what_the_command_shows(self):
        told, stages = [], []
        result = tpukit.check(JOB, verdict=told.append, progress=stages.append)
        assert result.fits
        assert told == [result.memory]
        assert stages[:3] == ["trace", "lower", "compile"]
        assert result.prediction.step_time_s > 0
        assert result.job == JOB
        assert result.to_dict()["verdict"] == "fits"
        assert result.next_command.startswith("tpukit flags tune tiny")

    @pytest.mark.parametrize(
        ("change", "moments"),
        [
            ({}, 2.0),
            ({"train.moment_dtype": "bfloat16"}, 1.5),
            ({"train.optimizer": "lion"}, 1.0),
            ({"train.optimizer": "lion", "train.moment_dtype": "bfloat16"}, 0.5),
            ({"train.optimizer": "sgd"}, 1.0),
            ({"train.optimizer": "adafactor"}, 0.1),
        ],
    )
    def test_the_optimizer_s_state_is_in_the_memory_answer(self, change, moments):
        """Moments in units of the parameters' own bytes, which are float32."""
        memory = tpukit.check(JOB, memory_only=True, **change).memory
        ratio = memory.purposes["optimizer state"] / memory.purposes["parameters"]
        assert ratio == pytest.approx(moments, abs=0.1)

    def test_parameters_in_half_the_bits_take_half_the_room(self):
        wide = tpukit.check(JOB, memory_only=True).memory.purposes["parameters"]
        narrow = tpukit.check(JOB, memory_only=True, **{"train.param_dtype": "bfloat16"})
        assert narrow.memory.purposes["parameters"] == pytest.approx(wide / 2, rel=0.05)

    def test_documents_are_two_more_rows_of_the_batch(self):
        plain = tpukit.check(JOB, memory_only=True).memory.argument_bytes
        packed = tpukit.check(JOB, memory_only=True, **{"train.packing": "documents"})
        assert packed.memory.argument_bytes > plain

    def test_a_limit_of_one_s_own_is_kept_to(self):
        whole = tpukit.check(JOB, memory_only=True)
        share = whole.memory.total_bytes / whole.memory.usable_bytes
        tight = tpukit.check(JOB, memory_only=True, memory_fraction=share / 2)
        assert whole.fits
        assert not tight.fits
        assert tight.exit_code == 3
        assert tight.memory.usable_bytes < whole.memory.total_bytes
        small = tpukit.check(JOB, memory_only=True, memory_per_chip="1MB")
        assert not small.fits
        assert small.memory.usable_bytes == 10**6

    def test_anybody_s_own_model(self):
        shapes = {"inputs": (8, 64), "targets": (8,)}
        import jax
        import jax.numpy as jnp

        work = Workload(
            lambda rngs: Net(rngs),
            batch={
                "inputs": jax.ShapeDtypeStruct(shapes["inputs"], jnp.float32),
                "targets": jax.ShapeDtypeStruct(shapes["targets"], jnp.int32),
            },
        )
        result = tpukit.check(work, on="v6e-8")
        assert result.fits
        assert result.job.model is work
        assert result.next_command == ""  # nobody can type it

    def test_old_compiles_make_room(self):
        from tpukit.compiler import CompileCache

        tpukit.check(JOB, memory_only=True, compile={"cache_max_size": 1}, remat="minimal")
        kept = [path.name for _, _, path in CompileCache.default()._files()]
        assert len([name for name in kept if not name.startswith("job-")]) == 1


def test_a_job_s_own_time_limit_ends_a_compile(monkeypatch):
    seen = {}

    def run(request, **how):
        seen.update(how)
        raise ConfigError("stopped by the test")

    monkeypatch.setattr(compiling, "run_request", run)
    with pytest.raises(ConfigError, match="stopped"):
        tpukit.check(JOB.replace(sequence_length=16), compile={"compilation_timeout_seconds": 7})
    assert seen["timeout_s"] == 7
