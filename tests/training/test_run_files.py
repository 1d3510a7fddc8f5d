"""Settings, metrics files, changed arguments, time, progress and hooks, each on its own."""

import io
import json
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from tpukit.errors import ConfigError, MeshError, MissingExtraError, TPUValidationError
from tpukit.hardware import get_chip
from tpukit.job import TrainingSettings
from tpukit.job.yaml_text import read_yaml
from tpukit.parallel.mesh.axes import name_axes
from tpukit.parallel.mesh.mesh import create_mesh, mesh_here
from tpukit.records import WandbHook, read_metrics
from tpukit.records.ledger import Ledger
from tpukit.records.metrics import MetricsFile
from tpukit.records.progress import Bar, Lines
from tpukit.step.workload import Workload
from tpukit.training import find_changes
from tpukit.training.batches import BatchSource, data_share, look_ahead
from tpukit.training.throughput import Throughput


def test_settings_read_the_train_section():
    settings = TrainingSettings(learning_rate="3e-4", no_decay="norm", steps=10)
    assert settings.learning_rate == 3e-4
    assert (settings.steps, settings.seed, settings.no_decay) == (10, 0, ("norm",))
    with pytest.raises(ConfigError, match=r"'warmup'.*Did you mean 'warmup_steps'"):
        TrainingSettings(warmup=3)
    with pytest.raises(ConfigError, match=r"'leaning_rate'.*Did you mean 'learning_rate'"):
        TrainingSettings(leaning_rate=3)
    with pytest.raises(ConfigError, match="steps=-1 is not valid"):
        TrainingSettings(steps=-1)
    again = TrainingSettings(**read_yaml(settings.to_yaml(), name="settings")[0])
    assert again == settings


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(0, 20), st.integers(0, 40))
def test_metrics_after_a_step_are_taken_out(tmp_path_factory, steps, keep, cut):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    file = MetricsFile(path)
    for step in steps:
        file.write({"step": step, "loss": 1.0})
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps({"step": 1, "loss": 0.5}).encode()[:cut])  # a killed write
    again = MetricsFile(path, after_step=keep)
    again.write({"step": keep + 1, "loss": float("inf")})
    again.close()
    found = read_metrics(path)
    assert [record["step"] for record in found[:-1]] == [step for step in steps if step <= keep]
    assert found[-1] == {"step": keep + 1, "loss": None, "not_finite": {"loss": "inf"}}


def test_no_metrics(tmp_path):
    with pytest.raises(TPUValidationError, match="name a run directory"):
        read_metrics(tmp_path)


def test_changes_are_named():
    old = {"x": jnp.zeros((2, 3)), "gone": jnp.zeros(1)}
    new = {"x": jnp.zeros((2, 3), jnp.bfloat16), "new": jnp.zeros((), jnp.int32)}
    assert [str(change) for change in find_changes(old, new, name="batch")] == [
        "batch['gone'] (float32[1]) is gone",
        "batch['x'] changed from float32[2,3] to bfloat16[2,3]",
        "batch['new'] is new (int32[])",
    ]
    assert find_changes(old, old) == []


def test_the_ledger_books_every_second_once():
    ledger = Ledger()
    with ledger.doing("compile"):
        time.sleep(0.02)
    for step in (1, 2, 3):
        time.sleep(0.01)
        ledger.completed(step, stalled_s=0.004)
    ledger.roll_back(2)
    goodput = ledger.goodput()
    booked = goodput.productive_s + sum(goodput.spent_s.values())
    assert booked == pytest.approx(goodput.wall_s, abs=0.01)
    assert goodput.spent_s["input_stall"] == pytest.approx(0.012)
    assert goodput.spent_s["lost"] > 0.005
    assert 0 < goodput.share < 1


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}])
def test_batches_arrive_whole(axes):
    mesh = create_mesh(mesh_shape=tuple(axes.values()), axis_names=tuple(axes))
    rows = PartitionSpec(tuple(name for name in axes if name != "tensor"))
    sharding = NamedSharding(mesh, rows)
    assert data_share(sharding, 16) == (0, 1)
    batch = {"x": np.arange(32.0).reshape(16, 2)}
    source = BatchSource(iter([batch]), {"x": sharding}, (0, 1))
    placed = source.place(source.draw())
    np.testing.assert_array_equal(placed["x"], batch["x"])
    assert placed["x"].dtype == jnp.float32
    assert placed["x"].sharding.is_equivalent_to(sharding, 2)
    with pytest.raises(StopIteration):
        source.draw()


class FakeDevice:
    def __init__(self, process_index):
        self.process_index = process_index


class FakeSharding:
    """Which rows each device of a job of several processes holds."""

    def __init__(self, spans):
        self.spans = spans

    def devices_indices_map(self, shape):
        return {FakeDevice(process): (slice(*span),) for process, span in self.spans}


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0, (0, 4)), (1, (4, 8))], (0, 2)),
        ([(1, (0, 4)), (0, (4, 8))], (1, 2)),
        ([(0, (0, 2)), (0, (2, 4)), (1, (4, 6)), (1, (6, 8))], (0, 2)),
        ([(0, (0, 8)), (1, (0, 8))], (0, 1)),
        ([(0, (0, 2)), (1, (2, 4)), (0, (4, 6)), (1, (6, 8))], (0, 1)),
    ],
)
def test_which_rows_a_process_loads(spans, share):
    assert data_share(FakeSharding(spans), 8) == share


def test_looking_ahead_takes_nothing_away():
    batches = [np.arange(8).reshape(2, 4), np.arange(8, 16).reshape(2, 4)]
    for source in (batches, lambda: iter(batches), iter(batches)):
        shapes, same = look_ahead(source)
        assert shapes["inputs"].shape == (2, 3)
        found = list(same() if callable(same) else same)
        np.testing.assert_array_equal(found, batches)
    with pytest.raises(TPUValidationError, match="yields no batch"):
        look_ahead([])


def test_meshes_from_numbers_and_plans():
    assert name_axes(None) == {"fsdp": -1}
    assert name_axes((8, 8)) == {"fsdp": 8, "tensor": 8}
    with pytest.raises(MeshError, match="give them names"):
        name_axes((2, 2, 2, 2))
    mesh = mesh_here({"fsdp": -1, "tensor": 2}, jax.devices())
    assert dict(mesh.shape) == {"fsdp": 4, "tensor": 2}
    with pytest.raises(MeshError, match=r"axis 'fsdp' of .* cannot be divided"):
        mesh_here({"fsdp": 8}, jax.devices(), dcn_mesh_shape=(3,))
    with pytest.raises(MeshError, match="give each axis its factor"):
        mesh_here({"fsdp": 8}, jax.devices(), dcn_mesh_shape=(2, 1))


def test_rates_of_a_tpu():
    class Device:
        device_kind, platform = "TPU v6 lite", "tpu"

    work = Workload("llama3.1-8b", batch_size=8, sequence_length=8192)
    speed = Throughput.of(work, [Device()] * 8)
    flops = work.config.flops_per_token(8192).total * 8 * 8192
    peak = get_chip("v6e").peak("bf16").value * 8e12
    assert speed.mfu(2.0) == pytest.approx(flops / 2.0 / peak)
    assert speed.tokens_per_s_per_chip(2.0) == 8192 / 2
    own = Workload((init_table, apply_table), batch_size=8, sequence_length=16)
    assert Throughput.of(own, [Device()]).mfu(2.0) is not None
    Device.platform, Device.device_kind = "gpu", "H200"
    assert Throughput.of(own, [Device()]).flops_per_step.value is None, "it is of no use there"
    unknown = Throughput.of(work, [Device()])
    assert unknown.mfu(2.0) is None
    assert "no peak is known for 'H200'" in unknown.no_mfu


def init_table(rng):
    return {"table": jax.random.normal(rng, (64, 64))}


def apply_table(params, batch):
    return params["table"][batch["inputs"]] @ params["table"]


RECORD = {"step": 3, "loss": 2.5, "step_time_s": 0.5, "tokens_per_s_per_chip": 1000.0, "mfu": None}


def test_plain_lines_come_now_and_then():
    out = io.StringIO()
    lines = Lines(Console(file=out, width=200), every_s=60)
    lines.start(done=2, total=10)
    for step, took in ((3, 0.5), (4, 0.4), (10, 0.1)):
        rate = 500 / took
        record = {**RECORD, "step": step, "step_time_s": took, "tokens_per_s_per_chip": rate}
        lines.update(record, goodput=0.9)
    lines.note("resumed")
    written = out.getvalue().splitlines()
    assert written[0].startswith(
        "step 3/10  loss 2.5000  0.500 s/step  1,000 tokens/s/chip  goodput 90%"
    )
    assert [line.split()[1] for line in written[:2]] == ["3/10", "10/10"]
    # The mean of the steps since the last line, not the last one alone.
    assert "0.250 s/step  2,000 tokens/s/chip" in written[1]
    assert written[2] == "resumed"


def test_the_bar_shows_the_same_figures():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    bar = Bar(console)
    bar.start(done=0, total=10)
    bar.update(RECORD, goodput=0.9)
    bar.close()
    shown = console.file.getvalue()
    assert "3/10" in shown
    assert "loss 2.5000  0.500 s/step  1,000 tokens/s/chip  goodput 90%" in shown


def test_wandb_is_an_extra_and_gets_every_record(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[wandb\]'"):
        WandbHook()
    logged, started = [], {}

    class Run:
        def log(self, record, step):
            logged.append((step, record["loss"]))

        def finish(self, exit_code):
            logged.append(exit_code)

    fake = types.SimpleNamespace(init=lambda **how: started.update(how) or Run())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    hook = WandbHook(project="p")
    hook.on_start(tmp_path / "one", {"seed": 0})
    hook.on_record(RECORD)
    hook.on_end(None)
    assert logged == [(3, 2.5), 1]
    assert (started["id"], started["resume"]) == ("one", "allow")


def test_jax_keeps_compiled_steps(monkeypatch, tmp_path):
    from tpukit.training.recompile import StepProgram, enable_compilation_cache

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        assert enable_compilation_cache() == tmp_path / "xla"
        mesh = create_mesh(mesh_shape=(1,), axis_names=("fsdp",), devices=jax.devices()[:1])
        model = (lambda rng: {"w": jnp.ones(3)}, lambda params, batch: (params["w"] ** 2).sum())
        shapes = {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
        found = []
        for _ in range(2):
            jax.clear_caches()
            # Options of a plan are for a TPU: another backend would refuse them.
            program = StepProgram(Workload(model, batch=shapes), mesh, options={"xla_tpu_x": 1})
            program.compile()
            found.append(program.from_cache)
            assert program.compile_s > 0
        assert found == [False, True]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def test_a_plans_compiler_options_reach_a_tpu(monkeypatch):
    from tpukit.training.recompile import options_here

    planned = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
    assert not planned.keys() & (options_here(planned) or {}).keys()  # on this CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert options_here(planned) == planned
    assert options_here({}) is None
