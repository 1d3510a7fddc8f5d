"""Runs of users' own models are exported in the files of their frameworks, and open there."""

import json

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tpukit import Workload
from tpukit.errors import TPUValidationError
from tpukit.job.train import TrainingSettings
from tpukit.training import TPUTrainer
from tpukit.training.export import export_run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("compile_quickly")
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
BATCH = {"inputs": X, "targets": np.array([0, 1, 2, 1], np.int32)}


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        mean = self.variable("seen", "mean", lambda: jnp.zeros(8))
        mean.value = x.mean(axis=0)
        return linen.Dense(4)(linen.Dense(8)(x))


class Equinox(equinox.Module):
    layers: list
    scale: float
    order: jax.Array

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x[self.order]) * self.scale
        return x


class Torch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8, bias=False)
        self.tied = torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 4)
        self.register_buffer("unsaved", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.tied(self.first(x * self.unsaved))))


def make_equinox():
    one, two = jax.random.split(jax.random.key(0))
    layers = [equinox.nn.Linear(8, 8, key=one), equinox.nn.Linear(8, 8, key=two)]
    return Equinox(layers, 2.0, jnp.arange(8)[::-1])


def trained(model, run, **settings):
    """Two steps of SGD on one batch."""
    wanted = {"checkpoint_every": 2, "run_dir": str(run), **settings}
    trainer = TPUTrainer(
        model=model, optimizer=optax.sgd(0.1), use_bf16=False, progress=False,
        devices=jax.devices()[:1], settings=TrainingSettings(**wanted),
    )  # fmt: skip
    trainer.train([BATCH], num_steps=2)
    return trainer


def opened(written, model):
    """What the export's own Python makes of the folder."""
    names = {"model": model, "folder": written.folder, "inputs": X}
    exec(written.opened_by, names)
    return names


def test_nnx_state_is_an_orbax_checkpoint(tmp_path, monkeypatch):
    trainer = trained(Nnx, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    written = export_run("run", "out")
    assert (written.framework, written.files) == ("flax nnx", ("README.md", "state"))
    assert written.size_bytes > 4 * written.parameters
    assert written.needs.startswith("test_own_exports.Nnx in ") or "Nnx in " in written.needs
    model = opened(written, Nnx(nnx.Rngs(7)))["model"]
    kernel = trainer.state.params["layers"][1]["kernel"]
    np.testing.assert_array_equal(model.layers[1].kernel[...], kernel)
    np.testing.assert_array_equal(model.norm.mean[...], trainer.state.model_state["norm"]["mean"])
    assert np.any(np.asarray(model.norm.mean[...]))


def test_linen_variables_are_msgpack(tmp_path):
    trainer = trained(Linen(), tmp_path / "run")
    written = export_run(tmp_path / "run", tmp_path / "out")
    names = opened(written, Linen())
    expected = {"params": trainer.state.params, **trainer.state.model_state}
    jax.tree.map(np.testing.assert_array_equal, names["variables"], jax.device_get(expected))


def test_equinox_leaves_are_its_own_file(tmp_path):
    trainer = trained(make_equinox(), tmp_path / "run")
    written = export_run(tmp_path / "run", tmp_path / "out")
    blank = jax.tree.map(lambda leaf: leaf * 0 if equinox.is_array(leaf) else 0.0, make_equinox())
    model = opened(written, blank)["model"]
    expected = equinox.combine(trainer.state.params, make_equinox())
    assert equinox.tree_equal(model, expected)
    assert (model.scale, model.order.tolist()) == (2.0, [7, 6, 5, 4, 3, 2, 1, 0])
    assert not equinox.tree_equal(model.layers[0], make_equinox().layers[0])


def test_a_module_is_its_state_dict(tmp_path):
    torch.manual_seed(0)
    trainer = trained(Workload(Torch(), batch=shapes()), tmp_path / "run")
    written = export_run(tmp_path / "run", tmp_path / "out")
    torch.manual_seed(1)
    fresh = Torch()
    before = fresh.last.weight.detach().clone()
    model = opened(written, fresh)["model"]
    assert model.tied.weight is model.first.weight
    np.testing.assert_array_equal(model.last.weight.detach(), trainer.state.params["last/weight"])
    assert not torch.equal(before, model.last.weight)
    assert int(model.norm.num_batches_tracked) == 2
    assert "Torch in " in written.needs


def shapes():
    return {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in BATCH.items()}


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory):
    """A run of a transformers object, with a tied head."""
    run = tmp_path_factory.mktemp("hf") / "run"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True, eos_token_id=5, bos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.top_k = 7
    tokens = np.arange(64).reshape(4, 16).astype(np.int32) % 32
    batch = {"input_ids": tokens, "labels": tokens}
    wanted = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in batch.items()}
    trainer = TPUTrainer(
        model=Workload(model, batch=wanted, inputs=("input_ids", "labels")), use_bf16=False,
        optimizer=optax.sgd(0.1), progress=False, devices=jax.devices()[:1],
        settings=TrainingSettings(checkpoint_every=2, run_dir=str(run)),
    )  # fmt: skip
    trainer.train([batch], num_steps=2)
    return run, trainer


def test_a_hugging_face_object_is_its_folder(huggingface, tmp_path):
    run, trainer = huggingface
    written = export_run(run, tmp_path / "out")
    assert "model.safetensors" in written.files
    model = opened(written, None)["model"]
    assert type(model) is transformers.LlamaForCausalLM
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, array in trainer.state.params.items():
        found = model.get_parameter(name.replace("/", "."))
        np.testing.assert_array_equal(found.detach(), array)
    assert (model.generation_config.top_k, model.generation_config.eos_token_id) == (7, 5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_functions_are_named_arrays(tmp_path):
    def init(rng):
        return {"deep": [{"w": jax.random.normal(rng, (8, 4))}]}

    def apply(params, batch):
        return batch["inputs"] @ params["deep"][0]["w"]

    trainer = trained((init, apply), tmp_path / "run")
    written = export_run(tmp_path / "run", tmp_path / "out")
    params = opened(written, None)["params"]
    np.testing.assert_array_equal(params["deep/0/w"], trainer.state.params["deep"][0]["w"])


def test_adapters_are_added_up(tmp_path):
    trained(Linen(), tmp_path / "run", lora={"rank": 2, "targets": ["Dense"]})
    written = export_run(tmp_path / "run", tmp_path / "out")
    variables = opened(written, Linen())["variables"]
    assert variables["params"]["Dense_0"]["kernel"].shape == (8, 4)
    assert written.parameters == 8 * 8 + 8 + 8 * 4 + 4


def test_the_code_is_named_and_a_run_without_a_record_is_told(tmp_path):
    (tmp_path / "net.py").write_text(
        "import jax\nfrom flax import linen\nfrom tpukit import Workload\n"
        "def build():\n"
        "    x = jax.ShapeDtypeStruct((4, 8), 'float32')\n"
        "    y = jax.ShapeDtypeStruct((4,), 'int32')\n"
        "    return Workload(linen.Dense(4), batch={'inputs': x, 'targets': y})\n"
    )
    run = tmp_path / "run"
    trained(f"{tmp_path}/net.py:build", run)
    written = export_run(run, tmp_path / "out")
    assert written.needs.endswith(f"built by {tmp_path}/net.py:build")
    text = (tmp_path / "out/README.md").read_text()
    assert "net.py:build" in text
    assert written.opened_by in text
    assert json.loads(json.dumps(written.to_dict()))["framework"] == "flax linen"
    (run / "model.json").unlink()
    with pytest.raises(TPUValidationError, match=r"model\.json.*one more step"):
        export_run(run, tmp_path / "again")
