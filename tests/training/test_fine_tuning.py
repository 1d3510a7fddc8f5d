"""Fine-tuning from weights that are there: whole, and by adapters beside them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUModelError, TPUValidationError
from tpukit.job import Job, TrainingSettings
from tpukit.job.step import build_step
from tpukit.models import export_huggingface, get_preset, import_huggingface
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.generation import Generator, Sampling
from tpukit.training import TPUTrainer
from tpukit.training.export import export_run
from tpukit.training.trained_model import load_trained

pytestmark = pytest.mark.usefixtures("compile_quickly")
CONFIG = get_preset("tiny").replace(vocab_size=32, n_layers=1)
SHAPE = {"batch_size": 8, "sequence_length": 16}
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model in Hugging Face's files."""
    folder = tmp_path_factory.mktemp("base") / "model"
    params = TransformerAdapter(CONFIG).init(jax.random.key(9)).params
    export_huggingface(params, CONFIG, folder)
    return folder


def trainer(base, run, **settings):
    wanted = {"learning_rate": 0.01, "checkpoint_every": 3, "run_dir": str(run), **settings}
    return TPUTrainer(
        model=CONFIG, settings=TrainingSettings(init_from=str(base), **wanted),
        use_bf16=False, progress=False, devices=jax.devices()[:1],
    )  # fmt: skip


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A run of adapters, stopped at 3 steps and gone on with to 6."""
    run = tmp_path_factory.mktemp("runs") / "run"
    tokens = _tokens()
    first = trainer(base, run, lora=LORA).train(tokens, 3, **SHAPE)
    second = trainer(base, run, lora=LORA).train(tokens, 6, **SHAPE)
    return run, first, second


def _tokens():
    steps = np.random.default_rng(0).choice([1, 2], size=4000, p=[0.9, 0.1])
    return (np.cumsum(steps) % 32).astype(np.uint16)


def logits(params, tokens):
    return np.asarray(TransformerAdapter(CONFIG).module(params, _plain())(jnp.asarray(tokens)))


def _plain():
    from tpukit.models.execution import Execution

    return Execution()


def test_training_begins_with_the_weights_named(base, tmp_path):
    result = trainer(base, tmp_path / "run", learning_rate=1e-9).train(_tokens(), 1, **SHAPE)
    begun = load_trained(tmp_path / "run").params if result.checkpoint_path else None
    found = import_huggingface(base).params
    assert begun is not None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), begun, found)


def test_adapters_are_trained_saved_gone_on_with_and_merged(base, tuned):
    run, first, second = tuned
    assert second.resumed_from == 3
    assert second.losses[-1] < first.losses[0]
    model = load_trained(run)
    before = import_huggingface(base).params
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), model.params, before)
    layers = changed["layers"]
    assert layers["self_attention"]["q_proj"]["kernel"]
    assert layers["mlp"]["down_proj"]["kernel"]
    assert not layers["self_attention"]["k_proj"]["kernel"]
    assert not changed["embed"]["embedding"]
    generated = Generator(model.config, model.params).generate(
        [np.arange(5)], max_new_tokens=4, sampling=Sampling(temperature=0)
    )
    assert len(generated.tokens[0]) == 4


def test_exports_are_the_sum_or_what_peft_reads(base, tuned, tmp_path):
    run, *_ = tuned
    tokens = np.arange(16)[None] % 32
    expected = logits(load_trained(run).params, tokens)
    export_run(run, tmp_path / "merged")
    merged = import_huggingface(tmp_path / "merged").params
    np.testing.assert_allclose(logits(merged, tokens), expected, atol=1e-5)
    written = export_run(run, tmp_path / "adapters", adapters=True)
    assert written.files == ("adapter_config.json", "adapter_model.safetensors")
    about = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (4, 8.0)
    assert about["base_model_name_or_path"] == str(base)
    beside = load_trained(tmp_path / "adapters").params
    np.testing.assert_allclose(logits(beside, tokens), expected, atol=1e-5)


def test_a_run_goes_on_with_its_own_adapters_only(base, tuned):
    run, *_ = tuned
    with pytest.raises(TPUValidationError, match="lora"):
        trainer(base, run, lora={**LORA, "rank": 8}).train(_tokens(), 8, **SHAPE)


def test_whole_runs_have_no_adapters_to_export(base, tmp_path):
    trainer(base, tmp_path / "run").train(_tokens(), 1, **SHAPE)
    with pytest.raises(TPUValidationError, match="no adapters"):
        export_run(tmp_path / "run", tmp_path / "out", adapters=True)


def test_weights_of_another_model_are_refused(base, tmp_path):
    with pytest.raises(TPUModelError, match="layers"):
        TPUTrainer(
            model=CONFIG.replace(d_ff=64), use_bf16=False, progress=False,
            devices=jax.devices()[:1],
            settings=TrainingSettings(init_from=str(base), run_dir=str(tmp_path / "run")),
        ).train(_tokens(), 1, **SHAPE)  # fmt: skip


def test_a_job_says_it_and_its_step_shrinks():
    words = {"model": "llama3.2-1b", "on": "v6e-4", "batch_size": 4, "sequence_length": 512}
    lora = {"rank": 8, "alpha": 16}
    job = Job.from_dict({**words, "train": {"lora": lora}})
    assert Job.from_dict(job.to_dict()).train.lora == job.train.lora
    whole = Job.from_dict(words)
    assert job.key != whole.key
    thin, full = build_step(job).work.state_shapes(), build_step(whole).work.state_shapes()

    def nbytes(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    # The model in bfloat16, once; 12 bytes for each number of the thin matrices.
    assert nbytes(thin.model_state) == 2 * sum(x.size for x in jax.tree.leaves(full.params))
    count = sum(leaf.size for leaf in jax.tree.leaves(thin.params))
    assert nbytes(thin.params) + nbytes(thin.opt_state) == pytest.approx(12 * count, rel=1e-3)
    assert nbytes(thin) < nbytes(full) / 5
    with pytest.raises(TPUValidationError, match="ranc"):
        Job.from_dict({**words, "train": {"lora": {"ranc": 8}}})


@pytest.mark.slow
def test_the_compiler_says_that_the_step_shrinks():
    from tpukit.compiler import compile_for

    words = {"model": "llama3.2-1b", "on": "v6e-4", "batch_size": 4, "sequence_length": 512}
    peaks = {}
    for name, train in {"whole": {}, "lora": {"lora": {"rank": 8}}}.items():
        job = Job.from_dict({**words, "train": train})
        compiled = compile_for(build_step(job).work, "v6e-4", mesh={"fsdp": 4}, until="memory")
        peaks[name] = compiled.memory.total_bytes
    assert peaks["lora"] < peaks["whole"] / 2
