"""Multi-token prediction against DeepSeek's own description, built of transformers' layers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface_models import VOCABULARY, make_model  # noqa: E402

from tpukit.models import export_huggingface, get_preset, import_huggingface  # noqa: E402
from tpukit.models.transformer.mtp import tokens_later  # noqa: E402
from tpukit.parallel.ring.order import to_zigzag  # noqa: E402
from tpukit.step.workload import Workload  # noqa: E402

LENGTH, WEIGHT = 24, 0.3


class Depth(torch.nn.Module):
    """One depth, with the names that published weights have."""

    def __init__(self, config):
        super().__init__()
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = deepseek.DeepseekV3RMSNorm(width, eps)
        self.hnorm = deepseek.DeepseekV3RMSNorm(width, eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layer = deepseek.DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = deepseek.DeepseekV3RMSNorm(width, eps)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A checkpoint with one depth, in files as DeepSeek publishes them, and the model itself."""
    folder = tmp_path_factory.mktemp("published")
    model = make_model("deepseek_v3")
    model.save_pretrained(folder)
    depth = Depth(model.config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in [*depth.parameters(), depth.layer.mlp.gate.e_score_correction_bias]:
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.ndim < 2 else 0.1 * noise)
    # The experts of one layer are one tensor in memory and many in a file, so that a model of one
    # more layer says what the file looks like.
    longer = transformers.AutoModelForCausalLM.from_config(
        type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 5}),
        attn_implementation="eager",
    )
    longer.model.layers[4].load_state_dict(depth.layer.state_dict())
    longer.save_pretrained(folder / "longer")
    tensors = load_file(folder / "model.safetensors")
    further = load_file(folder / "longer" / "model.safetensors")
    tensors |= {name: value for name, value in further.items() if ".layers.4." in name}
    before = "model.layers.4."
    tensors |= {
        before + "enorm.weight": depth.enorm.weight.detach().numpy(),
        before + "hnorm.weight": depth.hnorm.weight.detach().numpy(),
        before + "eh_proj.weight": depth.eh_proj.weight.detach().numpy(),
        before + "shared_head.norm.weight": depth.norm.weight.detach().numpy(),
        before + "shared_head.head.weight": tensors["lm_head.weight"].copy(),
        before + "embed_tokens.weight": tensors["model.embed_tokens.weight"].copy(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder, model, depth


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH + 1))


def loss_by_hand(model, depth, tokens):
    """The main loss, and that of the depth over as many tokens (arXiv 2412.19437, §2.2)."""
    given, after = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    with torch.no_grad():
        hidden = model.model(given).last_hidden_state  # normed
        main = torch.nn.functional.cross_entropy(
            model.lm_head(hidden).flatten(0, 1), after.flatten()
        )
        places = torch.arange(LENGTH - 1)[None].expand(2, -1)
        both = torch.cat(
            [depth.enorm(model.model.embed_tokens(given[:, 1:])), depth.hnorm(hidden[:, :-1])], -1
        )
        x = depth.eh_proj(both)
        mask = torch.full((LENGTH - 1, LENGTH - 1), float("-inf")).triu(1)[None, None]
        x = depth.layer(
            x,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=model.model.rotary_emb(x, places),
        )
        logits = model.lm_head(depth.norm(x[0] if isinstance(x, tuple) else x))
        further = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), after[:, 1:].flatten(), reduction="sum"
        )
    return float(main), float(further) / after.numel()


def test_the_loss_is_what_the_paper_says(published, tokens):
    folder, model, depth = published
    read = import_huggingface(folder)
    config = read.config.replace(dtype="float32", router_balance_weight=0.0)
    assert config.mtp_layers == 1
    main, further = loss_by_hand(model, depth, tokens)
    for weight in (0.0, WEIGHT):
        work = Workload(
            config.replace(mtp_weight=weight),
            batch_size=2,
            sequence_length=LENGTH,
            optimizer=optax.sgd(0.0),
        )
        state = work.init(jax.random.key(0))
        state = type(state)(state.step, read.params, state.opt_state, state.model_state)
        batch = {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
        _, metrics = jax.jit(work.train_step)(state, batch)
        assert metrics["loss"] == pytest.approx(main + weight * further, rel=2e-6)


def test_files_come_back_as_they_were(published, tmp_path):
    folder, _, _ = published
    read = import_huggingface(folder)
    export_huggingface(read.params, read.config, tmp_path)
    ours, theirs = (load_file(one / "model.safetensors") for one in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)


def test_weights_that_leave_the_depths_out_are_read_without(tmp_path):
    make_model("deepseek_v3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    read = import_huggingface(tmp_path)
    assert read.config.mtp_layers == 0
    assert "mtp" not in read.params


def test_a_depth_has_as_many_parameters_as_published():
    """README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: 11.5B unique ones, which is the layer alone.

    With its projection, and copies of embedding and unembedding, the files hold 684.5B.
    """
    one, none = (get_preset("deepseek-v3", mtp_layers=depths) for depths in (1, 0))
    more = one.parameter_count().total - none.parameter_count().total
    assert round((more - 2 * one.d_model**2) / 1e9, 1) == 11.5
    copied = 2 * one.vocab_size * one.d_model
    assert round((one.parameter_count().total + copied) / 1e9, 1) == 684.5


def test_the_end_of_a_document_is_not_predicted_across():
    targets = jnp.arange(8)[None]
    np.testing.assert_array_equal(tokens_later(targets, 2, fill=-1), [[2, 3, 4, 5, 6, 7, -1, -1]])
    spread = tokens_later(to_zigzag(targets, 2), 2, fill=-1, zigzag=2)
    np.testing.assert_array_equal(spread, to_zigzag(tokens_later(targets, 2, fill=-1), 2))
