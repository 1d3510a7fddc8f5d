"""Compiled forwards against eager torch: results, what is compiled again and why, what is kept."""

import copy
import logging
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from tpukit.torch import KernelPyTorchConfig, XLACompiler

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))


def close(ours, eager):
    torch.testing.assert_close(ours, eager.detach(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def compiler():
    return XLACompiler(KernelPyTorchConfig("inference"))


def counts(compiler):
    stats = compiler.get_compilation_stats()
    return stats["compilations"], stats["traces"], stats["compilation_cache"]["hits"]


def test_a_compiled_model_gives_what_eager_torch_gives(compiler):
    model, x = mlp(), torch.randn(3, 8)
    compiled = compiler.compile_model(model, x)
    assert counts(compiler) == (1, 1, 0)
    close(compiled(x), model(x))
    close(compiled(input=x.numpy()), model(x))
    assert counts(compiler) == (1, 1, 0)
    assert not compiled(x).requires_grad


def test_without_samples_the_first_call_compiles(compiler):
    model, x = mlp(), torch.randn(3, 8)
    compiled = compiler.compile_model(model, use_cache=True)
    assert counts(compiler) == (0, 0, 0)
    close(compiled(x), model(x))
    assert counts(compiler) == (1, 1, 0)


def test_what_changed_is_said_and_kept(compiler, caplog):
    model = mlp()
    compiled = compiler.compile_model(model, torch.randn(3, 8))
    with caplog.at_level(logging.WARNING, "tpukit.torch"):
        compiled(torch.randn(5, 8))
        compiled(torch.randn(5, 8))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert (
        "Sequential is compiled again because input changed from float32[3,8] to float32[5,8]"
        in said[0]
    )
    (change,) = compiler.get_compilation_stats()["recompilations"]
    assert change["changes"] == [{"path": "input", "old": "float32[3,8]", "new": "float32[5,8]"}]
    assert change["reason"] == "input changed from float32[3,8] to float32[5,8]"
    assert counts(compiler) == (2, 2, 0)


class Settings(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0, pair=(None, None)):
        x = x * scale if mask is None else x * mask * scale
        return {"x": x, "none": None, "pair": [x.sum(), pair[0]], "scale": scale}


def test_formats_settings_and_nesting_are_named_too(compiler):
    compiled = compiler.compile_model(Settings(), torch.ones(2))
    compiled(torch.ones(2, dtype=torch.int64))
    compiled(torch.ones(2), scale=2.0)
    compiled(torch.ones(2), scale=2)
    compiled(torch.ones(2), torch.ones(2))
    compiled(torch.ones(2), pair=(torch.ones(3), 1))
    reasons = [one["reason"] for one in compiler.get_compilation_stats()["recompilations"]]
    assert reasons == [
        "x changed from float32[2] to int32[2]",
        "scale is new (2.0)",
        "scale changed from 2.0 to 2",
        "mask is new (float32[2])",
        "pair[0] is new (float32[3]); pair[1] is new (1)",
    ]


def test_outputs_keep_their_structure(compiler):
    out = compiler.compile_model(Settings())(torch.ones(2), scale=3.0)
    assert out["none"] is None
    assert out["scale"] == 3.0
    assert out["pair"][0] == 6.0
    close(out["x"], torch.full((2,), 3.0))


def test_a_second_module_of_the_same_structure_compiles_nothing(compiler):
    x = torch.randn(3, 8)
    compiler.compile_model(mlp(), x)
    other = mlp()
    close(compiler.compile_model(other, x)(x), other(x))
    assert counts(compiler) == (1, 1, 1)
    compiler.compile_model(other, x, use_cache=False)
    assert counts(compiler) == (2, 2, 1)


class Scaled(nn.Module):
    def __init__(self, factor, tables=()):
        super().__init__()
        self.factor, self.tables = factor, list(tables)

    def forward(self, x):
        return x * self.factor + sum(self.tables)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (lambda: Scaled(2.0), lambda: Scaled(2.0), True),
        (lambda: Scaled(2.0), lambda: Scaled(3.0), False),
        (lambda: Scaled(1), lambda: Scaled(True), False),
        (lambda: Scaled(1.0, [torch.ones(2)]), lambda: Scaled(1.0, [torch.zeros(2)]), False),
        (lambda: nn.GELU("tanh"), lambda: nn.GELU(), False),
        (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2, bias=False), False),
        (lambda: nn.Dropout(0.5).eval(), lambda: nn.Dropout(0.5), False),
    ],
)  # fmt: skip
def test_settings_are_part_of_the_key_and_weights_are_not(compiler, one, other, shared):
    x = torch.ones(2, 2)
    compiler.compile_model(one(), x)
    second = other()
    ours = compiler.compile_model(second)(x)
    assert compiler.get_compilation_stats()["compilation_cache"]["hits"] == shared
    if not any(isinstance(part, nn.Dropout) for part in second.modules()):
        close(ours, second(x))


def test_the_cache_is_bounded_and_can_be_cleared():
    config = KernelPyTorchConfig("inference", cache_max_size=2)
    compiler = XLACompiler(config.hardware.tpu)
    model = mlp()
    for rows in (1, 2, 3):
        compiler.compile_model(model, torch.randn(rows, 8))
    stats = compiler.get_compilation_stats()["compilation_cache"]
    assert (stats["size"], stats["max_size"], stats["evictions"]) == (2, 2, 1)
    assert (stats["misses"], stats["hit_rate"]) == (3, 0.0)
    compiler.clear_cache()
    assert compiler.get_compilation_stats()["compilation_cache"]["size"] == 0


def test_weights_written_or_replaced_by_torch_are_seen(compiler):
    model, x = mlp(), torch.randn(3, 8)
    compiled = compiler.compile_model(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    close(compiled(x), model(x))
    model.load_state_dict(mlp().state_dict())
    close(compiled(x), model(x))
    model[0].weight = nn.Parameter(torch.randn(16, 8))
    close(compiled(x), model(x))
    model[0].weight.data.zero_()  # the one write that torch does not count
    compiled.refresh()
    close(compiled(x), model(x))
    assert counts(compiler)[0] == 1


def test_running_statistics_come_back_and_modes_are_two_programs(compiler):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    eager, x = copy.deepcopy(model), torch.randn(2, 3, 6, 6)
    compiled = compiler.compile_model(model)
    for _ in range(2):
        close(compiled(x), eager(x))
    close(model[1].running_var, eager[1].running_var)
    assert model[1].num_batches_tracked == 2
    model.eval(), eager.eval()
    close(compiled(x), eager(x))
    assert counts(compiler)[0] == 2
    assert compiler.get_compilation_stats()["recompilations"] == []


def test_dropout_draws_from_torchs_generator(compiler):
    compiled = compiler.compile_model(nn.Dropout(0.5))
    torch.manual_seed(3)
    first, second = compiled(torch.ones(64)), compiled(torch.ones(64))
    torch.manual_seed(3)
    again = compiled(torch.ones(64))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    model = mlp()
    before = torch.get_rng_state()
    compiler.compile_model(model)(torch.ones(2, 8))
    assert torch.equal(before, torch.get_rng_state())  # who draws nothing takes nothing


def test_a_hugging_face_model_gives_its_own_output(compiler):
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**TINY)).eval()
    ids = torch.randint(0, 32, (2, 6))
    inputs = {"input_ids": ids, "labels": torch.tensor([0, 1])}
    ours = compiler.compile_model(model, inputs)(**inputs)
    eager = model(**inputs)
    assert type(ours) is type(eager)
    close(ours.loss, eager.loss)
    close(ours["logits"], eager.logits)


def test_a_hugging_face_decoder_leaves_out_its_cache(compiler):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    ids = torch.randint(0, 32, (2, 6))
    ours = compiler.compile_model(model, ids)(ids)
    close(ours.logits, model(ids).logits)
    assert ours.past_key_values is None


@pytest.fixture
def fresh_disk_cache(tmp_path):
    """Programs on disk of this test alone; jax remembers its folder, so it is told to forget."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path / "xla"), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "xla"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_compile_that_might_take_long_runs_in_a_child(fresh_disk_cache):
    compiler = XLACompiler(KernelPyTorchConfig("inference", compilation_timeout_seconds=4.0))
    model, x = mlp(), torch.randn(3, 8)
    compiled = compiler.compile_model(model, x)
    close(compiled(x), model(x))
    stats = compiler.get_compilation_stats()
    assert stats["compiled"] == {"here": 0, "child": 1, "thread": 0}
    assert stats["from_disk"] == 1  # what the child compiled, this process found
    assert list(fresh_disk_cache.iterdir())


OTHER_PROCESS = """
    import torch
    from torch import nn
    from tpukit.torch import XLACompiler
    compiler = XLACompiler()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    compiler.compile_model(model, torch.ones(3, 8))
    print("found", compiler.get_compilation_stats()["from_disk"])
"""


def test_another_process_finds_the_program_on_disk(fresh_disk_cache):
    compiler = XLACompiler()
    compiler.compile_model(mlp(), torch.randn(3, 8))
    assert compiler.get_compilation_stats()["from_disk"] == 0
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(fresh_disk_cache)}
    run = [sys.executable, "-c", textwrap.dedent(OTHER_PROCESS)]
    out = subprocess.run(run, env=environment, capture_output=True, check=True, text=True)
    assert "found 1" in out.stdout


@pytest.mark.libtpu
def test_compile_for_is_the_check_of_a_training_step_within_the_limits():
    model, x = mlp(), torch.randn(8, 8)
    free = XLACompiler().compile_for("v6e-4", model, x, memory_only=True)
    assert free.fits
    assert free.job.remat == "full"  # as the training preset says
    small = XLACompiler(KernelPyTorchConfig(v6e_memory_gb=1e-5))
    assert not small.compile_for("v6e-4", model, x, memory_only=True).fits
    assert small.compile_for("v5e-4", model, x, memory_only=True).fits


def test_compile_for_takes_what_the_loss_alone_needs():
    from tpukit.torch.compiling.offline import job_for
    from tpukit.torch.config import tpu_settings

    sample = {"input": torch.empty(8, 8, device="meta"), "wanted": torch.ones(8, 4)}
    with torch.device("meta"):
        model = mlp()

    def loss(outputs, batch):
        return ((outputs - batch["wanted"]) ** 2).mean()

    settings = tpu_settings(KernelPyTorchConfig(memory_fraction=0.5))
    job = job_for(settings, "v6e-4", model, sample, loss=loss, changes={"mesh": {"data": 4}})
    assert job.memory_fraction == 0.5
    assert job.mesh == {"data": 4}
    assert {name: one.shape for name, one in job.model.batch_shapes().items()} == {
        "input": (8, 8),
        "wanted": (8, 4),
    }
    np.testing.assert_equal(job.model.state_shapes().params["0/weight"].shape, (16, 8))


def test_a_prepared_model_compiles_and_shows_what_fused_steps_left(compiler):
    from tpukit.torch import TPUBackend

    backend = TPUBackend(KernelPyTorchConfig())
    model = backend.prepare_model(mlp())
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    compiled = compiler.compile_model(model, x)
    close(compiled(x), model(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = backend.train_step(model, nn.functional.cross_entropy, optimizer)
    step(x, y)
    after = compiled(x)
    close(after, model(x))
    compiled(torch.randn(4, 8))
    (change,) = compiler.get_compilation_stats()["recompilations"]
    assert change["reason"] == "input changed from float32[8,8] to float32[4,8]"


def test_whole_numbers_come_back_as_torch_counts_them(compiler):
    class Largest(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    out = compiler.compile_model(Largest())(torch.eye(3))
    assert out.dtype == torch.int64
    assert out.tolist() == [0, 1, 2]
