"""Models of `transformers` as they come: trained on CPU against eager torch, checked, planned."""

import json

import jax
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tpukit import Job, TPUTrainer, plan
from tpukit.cli.app import app

BATCH, LENGTH, VOCABULARY, STEPS = 8, 16, 64, 3
BUILDERS = """
import torch
import transformers

TEXT = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, max_position_embeddings=64)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

def causal(kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**TEXT, **more)
    return getattr(transformers, kind + "ForCausalLM")(config)

def llama():
    return causal("Llama", num_key_value_heads=2)

def qwen2():
    return causal("Qwen2", num_key_value_heads=2)

def qwen3():
    return causal("Qwen3", num_key_value_heads=2, head_dim=8)

def bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **NO_DROPOUT))

def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, image_size=8, patch_size=4, num_labels=4, **NO_DROPOUT)
    sample = {"pixel_values": torch.zeros(8, 3, 8, 8), "labels": torch.zeros(8, dtype=torch.long)}
    return transformers.ViTForImageClassification(config), sample
"""
TEXT_MODELS = ("llama", "qwen2", "qwen3", "bert")
EVERY = (*TEXT_MODELS, "vit")


@pytest.fixture(scope="module")
def builders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "builders.py"
    path.write_text(BUILDERS)
    return path


def eager(builders, name):
    """The same model in plain torch."""
    space = {}
    exec(builders.read_text(), space)  # the text above
    made = space[name]()
    return made[0] if isinstance(made, tuple) else made


def batches(name):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        if name == "vit":
            yield {
                "pixel_values": rng.normal(size=(BATCH, 3, 8, 8)).astype(np.float32),
                "labels": rng.integers(0, 4, BATCH, dtype=np.int32),
            }
        else:
            ids = rng.integers(0, VOCABULARY, (BATCH, LENGTH + 1), dtype=np.int32)
            yield {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def eager_losses(model, name):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches(name):
        given = {key: torch.tensor(one) for key, one in batch.items()}
        optimizer.zero_grad()
        if name == "vit":
            loss = model(given["pixel_values"], labels=given["labels"].long()).loss
        else:
            logits = model(given["inputs"]).logits
            targets = given["targets"].flatten().long()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if "qwen" in n else n for n in EVERY]
)
def test_it_trains_as_in_eager_torch(builders, tmp_path, name):
    settings = {
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "schedule": "constant",
        "beta1": 0.0,
        "weight_decay": 0.0,
        "clip_norm": None,
        "steps": STEPS,
        "run_dir": str(tmp_path / "run"),
    }
    shape = {} if name == "vit" else {"batch_size": BATCH, "sequence_length": LENGTH}
    job = Job(model=f"torch:{builders}:{name}", mesh="fsdp=2", train=settings, **shape)
    trainer = TPUTrainer.from_job(job, progress=False, devices=jax.devices()[:2])
    result = trainer.train(batches(name))
    expected = eager_losses(eager(builders, name), name)
    assert result.losses == pytest.approx(expected, rel=1e-4)


def check(builders, name, *more):
    sizes = [] if name == "vit" else ["--batch-size", str(BATCH), "--sequence-length", str(LENGTH)]
    typed = ["check", "--torch", f"{builders}:{name}", "--on", "v6e-8", *sizes, "--json", *more]
    ran = CliRunner().invoke(app, typed)
    assert ran.exit_code == 0, ran.output + ran.stderr + repr(ran.exception)
    return json.loads(ran.stdout)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
class TestChecked:
    def test_llama_is_handed_over(self, builders, tmp_path):
        report = check(builders, "llama", "--handover", str(tmp_path / "handover"))
        assert report["memory"]["fits"]
        plan = json.loads((tmp_path / "handover" / "handover.json").read_text())
        assert plan["checked"]["memory"]["origin"] == "compiler"
        assert plan["checked"]["memory"]["total_bytes"] == report["memory"]["total_bytes"]
        assert plan["checked"]["step"]["origin"] == "model"
        assert plan["checked"]["step"]["step_time_s"] > 0
        names = [*eager(builders, "llama").state_dict()]
        assert [name for name in names if name in plan["parameters"]] == names

    def test_vit_with_its_own_inputs(self, builders):
        assert check(builders, "vit", "--memory-only")["memory"]["fits"]

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["qwen2", "qwen3", "bert"])
    def test_the_others(self, builders, name):
        report = check(builders, name)
        assert report["memory"]["fits"]
        assert report["prediction"]["step_time_s"] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["llama", "bert", "vit"])
    def test_planned(self, builders, name):
        answer = plan(
            f"torch:{builders}:{name}",
            tokens=1e6,
            on="v6e",
            max_chips=8,
            sequence_length=None if name == "vit" else LENGTH,
        )
        assert answer.feasible
        assert answer.best.verified.fits
        assert answer.best.job.model == f"torch:{builders}:{name}"
