"""torch.optim's formulas as optax transformations, step by step against torch itself."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn, optim

from tpukit.models.adapters.torch_module.arrays import to_array
from tpukit.models.adapters.torch_module.state import ModuleState
from tpukit.torch.optimizers import map_optimizer

MAKERS = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "sgd momentum": lambda m: optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "sgd nesterov": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "sgd maximize": lambda m: optim.SGD(m.parameters(), lr=1e-3, maximize=True),
    "adam": lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda m: optim.AdamW(m.parameters(), lr=0.01, eps=1e-6),
    "adamw groups": lambda m: optim.AdamW(
        [
            {"params": m[0].parameters(), "lr": 1e-3},
            {"params": m[2].parameters(), "weight_decay": 0.0, "betas": (0.5, 0.9)},
        ],
        lr=0.01,
    ),
    "adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.01, weight_decay=0.1),
    "adafactor eps": lambda m: optim.Adafactor(
        m.parameters(), lr=0.1, beta2_decay=-0.5, eps=(1e-8, 1e-2), d=2.0
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_formula_follows_torch(name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    eager = copy.deepcopy(module)
    optimizer, theirs = MAKERS[name](module), MAKERS[name](eager)
    mapped = map_optimizer(optimizer, module)
    params = {path: to_array(one) for path, one in ModuleState.of(module).trained.items()}
    state = mapped.transformation.init(params)
    update = jax.jit(mapped.transformation.update)
    for _ in range(20):
        theirs.zero_grad()
        (eager(torch.randn(32, 8)) ** 2).mean().backward()
        gradients = {
            path: jnp.asarray(one.grad.numpy().copy())
            for path, one in ModuleState.of(eager).trained.items()
        }
        theirs.step()
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    for path, tensor in ModuleState.of(eager).trained.items():
        np.testing.assert_allclose(params[path], tensor.detach(), rtol=2e-5, atol=1e-6)
    mapped.store(state)
    assert optimizer.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    for index, slots in theirs.state_dict()["state"].items():
        own = optimizer.state_dict()["state"][index]
        for slot, value in slots.items():
            if value is not None:
                np.testing.assert_allclose(own[slot], value, rtol=1e-4, atol=1e-7, err_msg=slot)
    # What was stored is what another mapping starts from.
    again = map_optimizer(optimizer, module).load(mapped.transformation.init(params))
    assert int(again.step) == (20 if state.slots and "sgd" not in name else int(bool(state.slots)))
    for slot, arrays in state.slots.items():
        for path, array in arrays.items():
            np.testing.assert_array_equal(again.slots[slot][path], array)
