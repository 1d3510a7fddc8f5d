"""Losses from their factors, and lookups, against eager torch."""

import copy

import jax
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from tpukit.models.adapters.torch_module.adapter import TorchModel
from tpukit.models.adapters.torch_module.lowerings import losses
from tpukit.step import Workload
from tpukit.torch.prepared import prepare

VOCABULARY, WIDTH = 4096, 8


class Head(nn.Module):
    def __init__(self, shape, **options):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.shape, self.options = shape, options

    def forward(self, x, labels):
        return functional.cross_entropy(self.shape(self.head(x)), labels, **self.options)


SHAPES = {
    "view": lambda logits: logits.float().view(-1, VOCABULARY),
    "flatten": lambda logits: logits.flatten(0, 1),
    "torch.flatten": lambda logits: torch.flatten(logits, 0, 1),
    "reshape": lambda logits: logits.to(torch.float32).reshape(-1, VOCABULARY).contiguous(),
    "scaled": lambda logits: (2 * logits).flatten(0, 1),
}


@pytest.fixture
def fused(monkeypatch):
    """Counts the losses that are computed from factors."""
    calls = []
    inner = losses.vocabulary_loss
    monkeypatch.setattr(
        losses, "vocabulary_loss", lambda *a, **k: calls.append(a) or inner(*a, **k)
    )
    return calls


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_loss_from_factors_is_the_loss_of_logits(fused, name, reduction):
    torch.manual_seed(0)
    eager = Head(SHAPES[name], reduction=reduction, ignore_index=7)
    model = prepare(copy.deepcopy(eager))
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (10,))
    labels[::3] = 7
    twin = x.detach().clone().requires_grad_()
    ours, theirs = model(x, labels), eager(twin, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad, rtol=1e-4, atol=1e-6)
    assert len(fused) == (0 if name == "scaled" else 1)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": torch.ones(VOCABULARY)}])
def test_what_the_factors_cannot_say_is_computed_from_logits(fused, options):
    eager = Head(SHAPES["view"], **options)
    model = prepare(copy.deepcopy(eager))
    x, labels = torch.randn(1, 4, WIDTH), torch.randint(0, VOCABULARY, (4,))
    torch.testing.assert_close(model(x, labels), eager(x, labels), rtol=1e-5, atol=1e-5)
    assert not fused


def test_logits_never_exist_whole_in_a_step(fused):
    """XLA drops a product that nobody reads, so that memory does not grow with the vocabulary."""
    tokens = 4 * 65536
    model = Head(lambda logits: logits.flatten(0, 1))
    shapes = {
        "x": jax.ShapeDtypeStruct((64, tokens // 64, WIDTH), "float32"),
        "labels": jax.ShapeDtypeStruct((64, tokens // 64), "int32"),
    }

    def forward(module, batch):
        return module(batch["x"], batch["labels"].reshape(-1))

    work = Workload(TorchModel(model, forward), batch=shapes)
    compiled = jax.jit(work.train_step).lower(work.state_shapes(), work.batch_shapes()).compile()
    assert len(fused) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * VOCABULARY * 4 / 2


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_a_row_of_padding_learns_nothing(padding):
    torch.manual_seed(0)
    eager = nn.Embedding(5, 3, padding_idx=padding)
    model = prepare(copy.deepcopy(eager))
    ids = torch.tensor([[0, 2, 4], [2, 4, 1]])
    model(ids).square().sum().backward()
    eager(ids).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
