"""Modules of torch.nn and common blocks against eager torch: a sample, and all of them."""

import pytest
import torch
from torch import nn
from torch_zoo import ZOO, compare

from tpukit.torch.prepared import link_of, prepare

# Each of these was wrong or missing in torchax, or is what most models are made of.
SAMPLE = (
    "Linear", "Embedding, by frequency", "EmbeddingBag, offsets", "EmbeddingBag, max",
    "Conv2d, padding same", "ConvTranspose2d, groups", "Fold", "MaxPool2d, dilation",
    "AvgPool2d, ceiling", "AdaptiveMaxPool2d", "MaxUnpool2d", "GELU, tanh", "BatchNorm2d",
    "InstanceNorm2d, statistics", "RMSNorm", "LSTM, projection", "MultiheadAttention, both masks",
    "scaled_dot_product_attention, grouped", "MultiLabelMarginLoss", "CTCLoss",
    "CrossEntropyLoss, weights, one ignored, smoothed", "pdist", "experts, two best",
    "spectral_norm", "index assignment", "interpolate, antialias",
)  # fmt: skip
# What no program can be made of: shapes that depend on values, or no gradient in jax.
NOT_COMPILED = {
    "FractionalMaxPool2d",
    "BatchNorm2d, plain average",
    "AdaptiveLogSoftmaxWithLoss",
    "orthogonal, Householder",
}
BY_NAME = {entry.name: entry for entry in ZOO}


def test_names_tell_the_modules_of_the_list_apart():
    assert len(BY_NAME) == len(ZOO) > 100
    assert set(SAMPLE) | NOT_COMPILED <= BY_NAME.keys()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_as_eager_torch(name):
    outcome = compare(BY_NAME[name])
    assert outcome.verdict == "equal", outcome


@pytest.mark.parametrize(
    "name",
    [
        "Linear",
        "Conv2d",
        "LayerNorm",
        "gated MLP",
        "MultiheadAttention, no mask",
        "scaled_dot_product_attention, wide heads",
    ],
)
def test_a_few_in_bfloat16(name):
    outcome = compare(BY_NAME[name], dtype=torch.bfloat16, tolerance=0.03)
    assert outcome.verdict == "equal", outcome


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.nn")  # what torch says of its own modules
def test_every_module_is_as_eager_torch_or_says_that_it_is_not_compiled():
    outcomes = [compare(entry) for entry in ZOO]
    assert not [one for one in outcomes if one.verdict in ("WRONG", "refused")]
    assert {one.entry.name for one in outcomes if one.verdict != "equal"} == NOT_COMPILED


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other, self.ranks = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x) + self.ranks(x).argsort(0), self.other(x)


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient_as_in_torch():
    module = prepare(Unused())
    module(torch.randn(4, 3))[0].sum().backward()
    reached = {name for name, one in module.named_parameters() if one.grad is not None}
    assert reached == {"used.weight", "used.bias"}


def test_a_call_that_is_wrong_says_so_in_torch_s_words_and_decides_nothing():
    module = prepare(nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        module(torch.ones(2, 3))
    assert not link_of(module).stays_eager
    assert module(torch.ones(2, 4)).shape == (2, 2)


def test_a_loss_without_any_alignment_is_infinite():
    steps, labels = torch.randn(2, 1, 3).log_softmax(-1), torch.tensor([[1, 1, 2]])
    for zero in (False, True):
        module = prepare(nn.CTCLoss(zero_infinity=zero))
        loss = module(steps, labels, torch.tensor([2]), torch.tensor([3]))
        assert loss.item() == (0 if zero else float("inf"))
