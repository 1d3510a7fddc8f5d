"""`TPUOptimizer`: what the levels change, proved in the program, and what it says of numbers."""

import copy
import math

import jax
import pytest
import torch
import torch.nn.functional as functional
from jax.extend.core import jaxprs_in_params
from torch import nn

from tpukit.errors import TPUOptimizationError, TPUValidationError
from tpukit.hardware.target import target_chip
from tpukit.models.remat.policy import NO_REMAT, RematPolicy
from tpukit.torch import KernelPyTorchConfig, TPUOptimizer, optimizing
from tpukit.torch.border import ModuleProgram
from tpukit.torch.optimizing import gradient_program
from tpukit.torch.prepared import link_of, prepare

pytestmark = pytest.mark.xdist_group("test_optimization")  # they share what is made once

LEVELS = ("conservative", "balanced", "aggressive")


class Norm(nn.Module):
    """A root-mean-square norm as people write it."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention as people write it."""

    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
        )

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (
            y.view(b, s, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.n_head)
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.c_proj((shares @ v).transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = Norm(width), Attention(width, 2)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Network(nn.Module):
    """Blocks, and a convolution that is no Linear layer."""

    def __init__(self, width=256):
        super().__init__()
        self.first = nn.Conv1d(width, width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        x = self.first(x.mT).mT
        for block in self.blocks:
            x = block(x)
        return x


def optimizer(**settings):
    return TPUOptimizer(KernelPyTorchConfig(**settings))


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    model, sample = Network(), torch.randn(2, 128, 256)
    return model, sample, {name: optimizer().optimize(model, sample, name) for name in LEVELS}


def traced(result, sample, chip="v6e"):
    """The program that the result's forward and backward become on a TPU."""
    module = result.optimized_model
    remat = link_of(module).remat
    program, shapes = gradient_program(module, lambda one, given: one(*given), [sample], remat)
    with target_chip(chip):
        return jax.jit(program).trace(*shapes)


def products(jaxpr):
    """Formats of the operands of every product, by the primitive's name."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            yield name, str(equation.invars[0].aval.dtype)
        for inner in jaxprs_in_params(equation.params):
            yield from products(getattr(inner, "jaxpr", inner))


def test_levels_compute_different_parts_in_bfloat16(results):
    _, sample, by_level = results
    found = {name: set(products(traced(one, sample).jaxpr.jaxpr)) for name, one in by_level.items()}
    assert ("dot_general", "bfloat16") in found["conservative"]
    # Scores of attention by hand and the convolution are no Linear layers.
    assert ("dot_general", "float32") in found["conservative"]
    for name in ("conservative", "balanced"):
        assert ("conv_general_dilated", "float32") in found[name]
        assert ("conv_general_dilated", "bfloat16") not in found[name]
    assert ("conv_general_dilated", "bfloat16") in found["aggressive"]
    assert ("conv_general_dilated", "float32") not in found["aggressive"]


def test_weights_and_the_original_stay_as_they_were(results):
    model, _, by_level = results
    for result in by_level.values():
        twin = result.optimized_model
        assert twin is not model
        assert isinstance(twin, Network)
        assert link_of(model) is None
        assert type(model.blocks[0].norm) is Norm
        assert {one.dtype for one in twin.parameters()} == {torch.float32}
        for (name, one), (other, two) in zip(
            model.state_dict().items(), twin.state_dict().items(), strict=True
        ):
            assert name == other
            assert torch.equal(one, two)


def test_attention_and_norms_by_hand_go_to_kernels_from_balanced_on(results):
    _, sample, by_level = results
    for name, kernels in (("conservative", False), ("balanced", True), ("aggressive", True)):
        text = str(traced(by_level[name], sample).jaxpr)
        assert ("pallas_call" in text) == kernels, name
        changes = " ".join(by_level[name].changes)
        assert ("blocks.0.norm (Norm) runs as rms_norm." in changes) == kernels
        assert ("blocks.1.attention (Attention) runs as causal scaled_dot" in changes) == kernels


def test_layers_are_computed_again_from_balanced_on(results):
    _, sample, by_level = results
    for name, again in (("conservative", False), ("balanced", True), ("aggressive", True)):
        names = {one.primitive.name for one in traced(by_level[name], sample).jaxpr.jaxpr.eqns}
        assert any("remat" in one or "checkpoint" in one for one in names) == again


def test_checkpoints_take_less_memory():
    module, sample = (
        nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(6))
        ),
        torch.randn(512, 64),
    )
    taken = {}
    for remat in (NO_REMAT, RematPolicy.parse("full")):
        program, shapes = gradient_program(module, lambda one, given: one(*given), [sample], remat)
        compiled = jax.jit(program).lower(*shapes).compile()
        taken[remat.active] = compiled.memory_analysis().temp_size_in_bytes
    assert taken[True] < 0.75 * taken[False]


def test_only_the_aggressive_level_reuses_inputs(monkeypatch):
    programs = []
    forward = ModuleProgram.forward

    def watched(program, arrays):
        programs.append((program, arrays))
        return forward(program, arrays)

    monkeypatch.setattr(ModuleProgram, "forward", watched)
    model, sample = nn.Linear(32, 32), torch.randn(4, 32)
    for name in LEVELS:
        twin = optimizer().optimize(model, sample, name).optimized_model
        with torch.no_grad():
            assert torch.equal(twin(sample), twin(sample))
        program, arrays = programs[-1]
        shapes = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), arrays.as_tuple()
        )
        memory = program._forward.lower(*shapes).compile().memory_analysis()
        reused = sample.nbytes if name == "aggressive" else 0
        assert memory.alias_size_in_bytes == reused


def test_numbers_are_near_the_original_and_measured(results):
    model, sample, by_level = results
    for result in by_level.values():
        assert 0 < result.numerical_error < result.tolerance
        with torch.no_grad():
            far = (result.optimized_model(sample) - model(sample)).abs().max() / model(
                sample
            ).abs().max()
        assert far.item() == pytest.approx(result.numerical_error, rel=0.2)
        figures = result.performance_metrics
        assert figures["forward_time_after"].origin == "measured"
        assert figures["parameter_bytes_after"].value == 4 * sum(
            p.numel() for p in model.parameters()
        )
        assert result.optimization_time > figures["forward_time_after"].value
        assert set(result.to_dict()) >= {"level", "changes", "numerical_error"}


def test_an_optimised_model_trains(results):
    _, sample, by_level = results
    twin = copy.deepcopy(by_level["conservative"].optimized_model)
    model = prepare(twin)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        steps.zero_grad()
        loss = functional.mse_loss(model(sample), torch.zeros_like(sample))
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


def test_shortcuts_are_the_levels_of_document_002():
    model, sample = nn.Linear(4, 2), torch.ones(2, 4)
    assert optimizer().optimize_for_inference(model, sample).level == "conservative"
    assert optimizer().optimize_for_training(model, sample).level == "aggressive"
    assert optimizer().optimize(model, {"input": sample}).level == "balanced"


def test_recurrent_layers_and_batch_norm_at_the_aggressive_level():
    lstm = optimizer().optimize(nn.LSTM(4, 8), torch.randn(5, 2, 4), "aggressive")
    assert lstm.level == "aggressive"
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    result = optimizer().optimize(module, torch.randn(2, 3, 8, 8), "aggressive")
    result.optimized_model(torch.randn(2, 3, 8, 8))
    assert result.optimized_model[1].running_mean.dtype == torch.float32
    assert result.optimized_model[1].num_batches_tracked == 1
    assert module[1].num_batches_tracked == 0


def test_hugging_face_norms_and_attention():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    sample = {"input_ids": torch.arange(16).reshape(2, 8), "use_cache": False}
    result = optimizer().optimize(LlamaForCausalLM(config), sample)
    said = " ".join(result.changes)
    assert "Attention runs as scaled_dot_product_attention" in said
    assert said.count("(LlamaRMSNorm) runs as rms_norm") == 5


def test_a_model_without_mixed_precision_stays_in_float32():
    model = nn.Linear(4, 2)
    result = optimizer(mixed_precision=False).optimize(model, torch.ones(2, 4), "aggressive")
    assert "float32: mixed_precision is off" in " ".join(result.changes)
    assert result.numerical_error < 1e-6


class TestWrongInput:
    @pytest.mark.parametrize(
        ("sample", "message"),
        [
            (torch.ones(2, 3), "cannot be called on sample_inputs: mat1 and mat2"),
            ("a sentence", "has no tensor, it is str"),
            (None, "has no tensor, it is NoneType"),
            ({"wrong": torch.ones(2, 4)}, "cannot be called on sample_inputs"),
        ],
    )
    def test_a_sample_that_does_not_go_with_the_model(self, sample, message, caplog):
        model = nn.Linear(4, 2)
        result = optimizer().optimize(model, sample)
        assert result.level == "none"
        assert result.optimized_model is model
        assert result.numerical_error is None
        assert "Nothing was optimized" in caplog.text
        with pytest.raises(TPUValidationError, match=message):
            optimizer(enable_strict_validation=True).optimize(model, sample)

    def test_a_level_that_there_is_not(self):
        with pytest.raises(TPUValidationError, match="Did you mean 'balanced'"):
            optimizer().optimize(nn.Linear(4, 2), torch.ones(2, 4), "balance")

    def test_a_module_that_cannot_be_a_program(self):
        class Branch(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        result = optimizer().optimize(Branch(), torch.ones(2))
        assert result.level == "none"
        assert "branches on the value" in result.changes[0]

    def test_numbers_that_differ_by_too_much(self, monkeypatch, caplog):
        tight = optimizing.Level("aggressive", "all", True, True, True, tolerance=1e-9)
        monkeypatch.setitem(optimizing.LEVELS, "aggressive", tight)
        model, sample = nn.Linear(64, 2), torch.randn(2, 64)
        assert optimizer().optimize(model, sample, "aggressive").level == "aggressive"
        assert "differs from the original by" in caplog.text
        with pytest.raises(TPUOptimizationError, match="use a lower level"):
            optimizer(enable_strict_validation=True).optimize(model, sample, "aggressive")


@pytest.mark.libtpu
def test_figures_of_a_slice_come_from_the_compiler():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))
    result = optimizer(tpu_version="v6e", num_chips=1).optimize(model, torch.randn(4096, 512))
    figures = result.performance_metrics
    assert figures["memory_before"].origin == figures["memory_after"].origin == "compiler"
    assert figures["step_time_after"].origin == "model"
    assert figures["memory_after"].value < figures["memory_before"].value
