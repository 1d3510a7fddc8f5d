"""A prepared model in the user's own loop, and in a fused step, against eager torch."""

import copy
import re

import jax
import pytest
import torch
from torch import nn
from torch_models import CASES

from tpukit import create_mesh
from tpukit.errors import TPUModelError, TPUOptimizationError, TPUValidationError
from tpukit.torch import KernelPyTorchConfig, TPUBackend
from tpukit.torch.prepared import link_of

STEPS, CLOSE = 20, 1e-4
SLOW = ("llama", "qwen", "bert", "vit", "resnet")  # each compiles for seconds


@pytest.fixture
def backend():
    return TPUBackend(KernelPyTorchConfig(gradient_checkpointing=False))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loop(case, model, optimizer, batches):
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = case.eager_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def relative(found, expected):
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_twenty_steps_of_either_loop_match_eager_torch(backend, name):
    case = CASES[name]
    torch.manual_seed(0)
    eager = case.build().train()
    own, fused = copy.deepcopy(eager), copy.deepcopy(eager)
    batches = case.batches()[:STEPS]
    expected = loop(case, eager, adamw(eager), batches)
    own = backend.prepare_model(own)
    assert relative(loop(case, own, adamw(own), batches), expected) < CLOSE
    fused = backend.prepare_model(fused)
    devices = jax.devices() if name in ("mlp", "gpt") else jax.devices()[:1]
    mesh = create_mesh(mesh_shape=(len(devices),), axis_names=("fsdp",), devices=devices)
    step = backend.train_step(fused, case.loss, adamw(fused), mesh=mesh)
    found = [step(inputs, targets) for inputs, targets in batches]
    assert relative([one.item() for one in found], expected) < CLOSE
    assert step.traces == 1


def test_the_loops_take_turns(backend):
    """What one has learned the other goes on with, moments and all."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    eager = case.build()
    model = backend.prepare_model(copy.deepcopy(eager))
    optimizer, batches = adamw(model), case.batches()
    expected = loop(case, eager, adamw(eager), batches)
    step = backend.train_step(model, case.loss, optimizer)
    found = loop(case, model, optimizer, batches[:5])
    found += [step(*batch).item() for batch in batches[5:12]]
    found += loop(case, model, optimizer, batches[12:16])
    found += [step(*batch).item() for batch in batches[16:]]
    assert relative(found, expected) < CLOSE
    assert step.traces == 1


def test_a_scheduler_moves_the_rate_and_nothing_is_compiled_again(backend):
    case = CASES["mlp"]
    torch.manual_seed(0)
    eager = case.build()
    model = backend.prepare_model(copy.deepcopy(eager))
    losses = {}
    for which in (eager, model):
        optimizer = torch.optim.SGD(which.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.1)
        step = None if which is eager else backend.train_step(model, case.loss, optimizer)
        losses[which] = []
        for batch in case.batches():
            if step is None:
                losses[which] += loop(case, eager, optimizer, [batch])
            else:
                losses[which].append(step(*batch).item())
                optimizer.step()  # a scheduler wants to see it called; there are no gradients
            schedule.step()
    assert relative(losses[model], losses[eager]) < CLOSE
    assert step.traces == 1


def test_dropout_draws_from_the_seed(backend):
    model = backend.prepare_model(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    x = torch.ones(2, 4)
    backend.manual_seed(1)
    first, second = model(x), model(x)
    backend.manual_seed(1)
    again = model(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    kept = (first != 0).float().mean().item()
    assert 0.3 < kept < 0.7
    model.eval()
    assert torch.equal(model(x), model(x))


def test_reading_a_model_after_fused_steps_brings_its_newest_values(backend):
    model = backend.prepare_model(nn.Linear(3, 2))
    before = model.weight.detach().clone()
    step = backend.train_step(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x, y = torch.ones(8, 3), torch.zeros(8, 2)
    step(x, y)
    assert not torch.equal(model.weight, before)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(1.0)
    assert step(x, y).item() == pytest.approx(1.0)


def test_another_shape_compiles_again_and_says_which(backend, caplog):
    model = backend.prepare_model(nn.Linear(3, 2))
    step = backend.train_step(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    step(torch.ones(8, 3), torch.zeros(8, 2))
    step(torch.ones(16, 3), torch.zeros(16, 2))
    step(torch.ones(8, 3), torch.zeros(8, 2))
    assert step.traces == 2
    assert "from ((8, 3), 'float32') to ((16, 3), 'float32')" in caplog.text


def test_gradients_reach_the_inputs(backend):
    model = backend.prepare_model(nn.Linear(4, 3))
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(2, 4))


class HalfUsed(nn.Module):
    """A layer that the loss does not reach, and one that only a detached path does."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.detached = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.used(x) + self.detached(x).detach()


def test_weight_decay_leaves_parameters_alone_that_the_loss_does_not_reach(backend):
    torch.manual_seed(0)
    eager = HalfUsed()
    model = backend.prepare_model(copy.deepcopy(eager))
    x, y = torch.ones(8, 4), torch.zeros(8, 4)
    for which in (eager, model):
        optimizer = torch.optim.AdamW(which.parameters(), lr=0.1, weight_decay=0.5)
        step = (
            backend.train_step(model, nn.functional.mse_loss, optimizer) if which is model else None
        )
        for _ in range(3):
            if step is not None:
                step(x, y)
                continue
            optimizer.zero_grad()
            nn.functional.mse_loss(eager(x), y).backward()
            optimizer.step()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_what_is_said_of_other_optimizers(backend):
    model = backend.prepare_model(nn.Linear(2, 2))
    with pytest.raises(TPUOptimizationError, match="RMSprop has no exact counterpart"):
        backend.train_step(model, None, torch.optim.RMSprop(model.parameters()))
    with pytest.raises(TPUOptimizationError, match="not in Linear"):
        backend.train_step(model, None, torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(TPUOptimizationError, match="Own has no exact counterpart"):
        backend.train_step(model, None, Own(model.parameters(), lr=0.1))


def test_a_model_without_a_loss(backend):
    model = backend.prepare_model(nn.Linear(2, 2))
    step = backend.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TPUModelError, match="returns no scalar loss"):
        step(torch.ones(8, 2))
    with pytest.raises(TPUValidationError, match="this batch has none"):
        step(3)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


class WritesToItsInput(nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Branching, r"branches on the value.*test_loops\.py"),
        (WritesToItsInput, "changes its input"),
    ],
)
def test_what_cannot_be_a_program_stays_plain_torch_and_says_why(backend, build, message):
    torch.manual_seed(0)
    eager = build()
    model = backend.prepare_model(copy.deepcopy(eager))
    x, same = torch.ones(2, 2), torch.ones(2, 2)
    torch.testing.assert_close(model(x), eager(same))
    assert torch.equal(x, same)
    assert re.search(message, link_of(model).stays_eager)
    strict = KernelPyTorchConfig(gradient_checkpointing=False)
    other = TPUBackend(strict)
    other.settings.enable_strict_validation = True  # there is no TPU, so not before
    with pytest.raises(TPUValidationError, match=message):
        other.prepare_model(build())(x)
