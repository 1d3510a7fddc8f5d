"""A PyTorch module through a workload, against eager torch."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from tpukit.errors import TPUModelError
from tpukit.models.adapters.torch_module.adapter import TorchAdapter
from tpukit.step import Workload

STEPS = 6


def tokens(batch=4, length=16, vocabulary=64):
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1), dtype=np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def pictures():
    rng = np.random.default_rng(0)
    return {
        "inputs": rng.normal(size=(16, 3, 8, 8)).astype(np.float32),
        "targets": rng.integers(0, 10, 16, dtype=np.int32),
    }


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (
            y.view(b, s, 4, d // 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Tied to its embedding, with a list of layers and a tensor that is no buffer."""

    def __init__(self, vocabulary=64, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.gain = torch.tensor(0.5)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


def work_for(module, batch, **options):
    shapes = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in batch.items()}
    options.setdefault("optimizer", optax.sgd(0.05))
    return Workload(module, batch=shapes, **options)


def torch_losses(module, batch, steps=STEPS):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = module(torch.tensor(batch["inputs"]))
        targets = torch.tensor(batch["targets"]).long()
        loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def our_losses(work, batch, steps=STEPS):
    state, step, found = work.init(jax.random.key(0)), jax.jit(work.train_step), []
    for _ in range(steps):
        state, metrics = step(state, {name: jnp.asarray(one) for name, one in batch.items()})
        found.append(float(metrics["loss"]))
    return found, state


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize(
    ("build", "batch"), [(Gpt, tokens()), (convolutions, pictures())], ids=["gpt", "convolutions"]
)
def test_a_module_learns_as_in_eager_torch(build, batch, remat):
    torch.manual_seed(0)
    module = build()
    eager = copy.deepcopy(module)
    expected = torch_losses(eager, batch)
    losses, state = our_losses(work_for(module, batch, remat=remat), batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    own = {name.replace("/", "."): one for name, one in state.params.items()}
    assert own.keys() == {name for name, _ in eager.named_parameters()}
    for name, value in eager.named_parameters():
        np.testing.assert_allclose(own[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_running_statistics_move_as_in_torch():
    torch.manual_seed(0)
    module, batch = convolutions(), pictures()
    eager = copy.deepcopy(module)
    torch_losses(eager, batch)
    _, state = our_losses(work_for(module, batch, remat=None), batch)
    found = {name.replace("/", "."): one for name, one in state.model_state.items()}
    for name, value in eager.named_buffers():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert found["1.num_batches_tracked"] == STEPS


def test_training_leaves_the_users_module_as_it_was():
    module, batch = Gpt(), tokens()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    our_losses(work_for(module, batch), batch, steps=2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert module(torch.tensor(batch["inputs"])).requires_grad


def test_dropout_differs_by_step_and_repeats_by_seed():
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    batch = {
        "inputs": np.ones((4, 8), np.float32),
        "targets": np.zeros(4, np.int32),
    }
    frozen = {"optimizer": optax.sgd(0.0)}
    losses, _ = our_losses(work_for(module, batch, **frozen), batch)
    again, _ = our_losses(work_for(module, batch, **frozen), batch)
    other, _ = our_losses(work_for(module, batch, seed=1, **frozen), batch)
    assert len(set(losses)) == STEPS
    assert losses == again
    assert losses != other


def test_frozen_parameters_stay():
    module, batch = Gpt(), tokens()
    for one in module.blocks[0].parameters():
        one.requires_grad_(False)
    work = work_for(module, batch)
    _, state = our_losses(work, batch, steps=2)
    assert not any(name.startswith("blocks/0") for name in state.params)
    np.testing.assert_array_equal(
        state.model_state["blocks/0/out/weight"], module.blocks[0].out.weight.detach()
    )


def test_a_module_on_the_meta_device_has_shapes_and_no_values():
    with torch.device("meta"):
        module = Gpt()
    work = work_for(module, tokens())
    assert work.state_shapes().params["embed/weight"].shape == (64, 32)
    with pytest.raises(TPUModelError, match="meta device and has no values"):
        work.init(jax.random.key(0))


def test_one_program_on_eight_devices_gives_the_same_loss():
    from tpukit import create_mesh

    batch = tokens(batch=8)
    torch.manual_seed(0)
    module = Gpt()
    expected = torch_losses(copy.deepcopy(module), batch, steps=3)
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "tensor"))
    work = work_for(module, batch, strategy="fsdp+megatron")
    state = work.init_on(mesh, jax.random.key(0))
    step = work.jit_train_step(mesh)
    losses = []
    for _ in range(3):
        state, metrics = step(state, work.put_batch(mesh, batch))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    shard = state.params["blocks/0/mlp/0/weight"].addressable_shards[0].data
    assert shard.size < 32 * 64


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x.sum()
        return -x.sum()


class Masking(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branching(), r"branches on the value.*test_torch_adapter\.py:\d+: if x\.sum"),
        (Masking(), r"selects by a boolean mask.*return x\[x > 0\]"),
    ],
)
def test_what_cannot_be_one_program_is_refused_with_its_line(module, message):
    batch = {"inputs": np.ones((2, 4), np.float32)}
    work = work_for(nn.Sequential(nn.Linear(4, 4), module), batch)
    with pytest.raises(TPUModelError, match=message):
        jax.eval_shape(work.train_step, work.state_shapes(), work.batch_shapes())


@pytest.mark.parametrize("file", ["tpukit/model.py", "src/tpukit/jax/my_contextlib.py"])
def test_the_line_is_named_in_whatever_folder_the_users_file_is(tmp_path, file):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("def forward(self, x):\n    return x if x.sum() > 0 else -x\n")
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    module = type("Branching", (nn.Module,), {"forward": names["forward"]})()
    work = work_for(module, {"inputs": np.ones((2, 4), np.float32)})
    with pytest.raises(TPUModelError, match=rf"{path.name}:2: return x if"):
        jax.eval_shape(work.train_step, work.state_shapes(), work.batch_shapes())


def test_tensors_that_a_forward_makes_or_finds_take_part():
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = [torch.full((4,), 2.0)]

        def forward(self, x):
            return (x * torch.arange(4) * torch.ones(4, device=x.device) * self.tables[0]).sum()

    batch = {"inputs": np.ones((2, 4), np.float32)}
    module = nn.Sequential(nn.Linear(4, 4), Constants())
    expected = module(torch.ones(2, 4)).item()
    losses, _ = our_losses(work_for(module, batch), batch, steps=1)
    np.testing.assert_allclose(losses, [expected], rtol=1e-6)


def test_inputs_are_given_by_name_where_the_module_has_that_name():
    class Named(nn.Module):
        def forward(self, first, *, second):
            return (first - second).sum()

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    work = Workload(
        nn.Sequential(), batch={"second": shape, "x": shape}, inputs=("second", "x")
    ).replace(model=Named())
    assert isinstance(work.adapter, TorchAdapter)
    batch = {"second": jnp.ones(2), "x": jnp.full(2, 3.0)}
    from tpukit.models.adapters import Variables

    applied = work.adapter.apply(
        Variables({}, {}), batch, rng=jax.random.key(0), execution=work.execution
    )
    assert float(applied.outputs) == 4.0
