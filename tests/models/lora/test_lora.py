"""Adapters: what is trained, what stays, what they add; in files, by peft's own word."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tpukit import Workload, create_mesh
from tpukit.errors import TPUModelError
from tpukit.models import export_huggingface, get_preset
from tpukit.models.adapters import Variables
from tpukit.models.lora.adapter import with_low_rank
from tpukit.models.lora.peft_files import read_peft, write_peft
from tpukit.models.lora.spec import LoraSpec

SPEC = LoraSpec(rank=4, alpha=6.0)
SHAPE = {"batch_size": 4, "sequence_length": 16}


def noisy(params, seed=0):
    """The same tree with numbers that let every thin matrix matter."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [jnp.asarray(rng.normal(0, 0.05, leaf.shape), leaf.dtype) for leaf in leaves]
    )


def logits(work, params, state, tokens):
    return work.adapter.apply(
        Variables(params, state), {"inputs": tokens}, rng=jax.random.key(0),
        execution=work.execution,
    ).outputs  # fmt: skip


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("scan", [True, False])
def test_only_the_thin_matrices_are_trained(remat, scan):
    work = Workload("tiny", **SHAPE, lora=SPEC, remat=remat, scan_layers=scan)
    state = work.init(jax.random.key(0))
    batch = work.example_batch()
    new, metrics = jax.jit(work.train_step)(state, batch)
    plain = Workload("tiny", **SHAPE, remat=remat, scan_layers=scan)
    whole, expected = jax.jit(plain.train_step)(plain.init(jax.random.key(0)), batch)
    # Their product begins as nothing, so that the first loss is the model's own.
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, new.model_state["base"], state.model_state["base"])
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), new.params, state.params)
    assert all(pair["b"] for pair in _pairs(moved))
    few, many = (sum(x.size for x in jax.tree.leaves(s.opt_state)) for s in (new, whole))
    assert few < many / 5


def _pairs(tree):
    if "a" in tree:
        return [tree]
    return [pair for below in tree.values() for pair in _pairs(below)]


def test_gradients_are_those_of_the_merged_matrix_in_float64():
    """dA = scale · dW Bᵀ and dB = scale · Aᵀ dW, of the whole model's own dW."""
    config = get_preset("tiny").replace(dtype="float32", param_dtype="float32")
    work = Workload(config, **SHAPE, lora=SPEC)
    plain = Workload(config, **SHAPE)
    variables = work.adapter.init(jax.random.key(0))
    thin, base = noisy(variables.params), variables.model_state["base"]
    batch = work.example_batch()

    def loss(adapter, params, state):
        out = adapter.apply(
            Variables(params, state), batch, rng=jax.random.key(0), execution=plain.execution
        ).outputs
        if hasattr(out, "total"):
            return out.total
        picked = jnp.take_along_axis(jax.nn.log_softmax(out), batch["targets"][..., None], -1)
        return -picked.sum()

    found = jax.grad(lambda p: loss(work.adapter, p, variables.model_state))(thin)
    merged = with_low_rank(base, thin, SPEC)
    whole = jax.grad(lambda p: loss(plain.adapter, p, {}))(merged)
    for name in ("self_attention", "mlp"):
        for proj, pair in found["layers"][name].items():
            d_w = np.float64(whole["layers"][name][proj]["kernel"])
            own = jax.tree.map(np.float64, thin["layers"][name][proj]["kernel"])
            size = abs(d_w).max()
            np.testing.assert_allclose(
                pair["kernel"]["a"], SPEC.scale * d_w @ own["b"].swapaxes(1, 2), atol=1e-4 * size
            )
            np.testing.assert_allclose(
                pair["kernel"]["b"], SPEC.scale * own["a"].swapaxes(1, 2) @ d_w, atol=1e-4 * size
            )


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_merged_and_beside_give_the_same_logits(preset):
    work, plain = Workload(preset, **SHAPE, lora=SPEC), Workload(preset, **SHAPE)
    variables = work.adapter.init(jax.random.key(0))
    thin = noisy(variables.params)
    tokens = work.example_batch()["inputs"]
    beside = logits(work, thin, variables.model_state, tokens)
    merged = with_low_rank(variables.model_state["base"], thin, SPEC)
    whole = logits(plain, merged, {}, tokens)
    without = logits(plain, variables.model_state["base"], {}, tokens)
    assert abs(whole - without).max() > 0.05
    np.testing.assert_allclose(beside, whole, atol=2e-4 * abs(whole).max())


def test_what_is_small_beside_the_base_is_not_rounded_away():
    config = get_preset("tiny").replace(dtype="bfloat16", param_dtype="bfloat16")
    work = Workload(config, **SHAPE, lora=LoraSpec(rank=4, alpha=4.0, targets=("q_proj",)))
    variables = work.adapter.init(jax.random.key(0))
    base = variables.model_state["base"]
    pair = variables.params["layers"]["self_attention"]["q_proj"]["kernel"]
    tiny = {"a": pair["a"], "b": jnp.full_like(pair["b"], 1e-5)}
    thin = {"layers": {"self_attention": {"q_proj": {"kernel": tiny}}}}
    kernel = base["layers"]["self_attention"]["q_proj"]["kernel"]
    merged = with_low_rank(base, thin, work.lora)
    same = merged["layers"]["self_attention"]["q_proj"]["kernel"] == kernel
    assert same.mean() > 0.9  # which is what a sum in bfloat16 makes of it
    whole = with_low_rank(base, thin, work.lora, in_layers=True)
    low = whole["layers"]["self_attention"]["q_proj"]["kernel"]
    x = jnp.ones((1, kernel.shape[1]), jnp.bfloat16)
    assert float(abs(low.update(x)).max()) > 0


def test_base_weights_lie_as_without_adapters_and_moments_shrink_on_a_mesh():
    mesh = create_mesh(mesh_shape=(2, 2), axis_names=("fsdp", "tensor"), devices=jax.devices()[:4])
    work = Workload("tiny", **SHAPE, lora=SPEC, strategy="fsdp+megatron")
    plain = Workload("tiny", **SHAPE, strategy="fsdp+megatron")
    shardings = work.shardings(mesh).state
    expected = plain.shardings(mesh).state.params
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.spec == b.spec, shardings.model_state["base"], expected)
    )
    state = work.init_on(mesh, jax.random.key(0))
    step = work.jit_train_step(mesh)
    _, metrics = step(state, work.put_batch(mesh, work.example_batch()))
    assert np.isfinite(metrics["loss"])


def test_losses_in_chunks_make_no_gradient_of_a_frozen_head():
    def program(**settings):
        work = Workload("tiny", **SHAPE, loss_chunks=2, **settings)
        state = work.state_shapes()
        return str(jax.make_jaxpr(work.train_step)(state, work.batch_shapes()))

    config = get_preset("tiny")
    of_the_head = f"[1,{config.d_model},{config.vocab_size}]"  # one of each group's copies
    assert f"f32{of_the_head} = dot_general" in program()
    assert f"f32{of_the_head} = dot_general" not in program(lora=SPEC)
    embedding = LoraSpec(rank=2, targets=("embed",))
    assert f"f32{of_the_head} = dot_general" in program(lora=embedding)


def test_any_model_whose_matrices_have_a_path():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return jnp.mean(self.second(jax.nn.relu(self.first(x))) ** 2)

    shapes = {"inputs": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    work = Workload(
        Net(nnx.Rngs(0)), batch=shapes, optimizer=optax.sgd(0.5),
        lora=LoraSpec(rank=2, alpha=2.0, targets=("first/kernel",)),
    )  # fmt: skip
    state = work.init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, state.params) == {
        "first": {"kernel": {"a": (8, 2), "b": (2, 16)}}
    }
    batch = work.example_batch()
    losses = []
    for _ in range(5):
        state, metrics = jax.jit(work.train_step)(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("targets", "words"),
    [(("q_porj",), "q_proj"), (("(",), "not a regular expression"), ((), "no matrices")],
)
def test_targets_that_mean_nothing(targets, words):
    work = Workload("tiny", **SHAPE, lora=LoraSpec(targets=targets))
    with pytest.raises(TPUModelError, match=words):
        work.init(jax.random.key(0))


def test_pipelines_say_that_they_know_no_adapters():
    mesh = create_mesh(mesh_shape=(2,), axis_names=("pipeline",), devices=jax.devices()[:2])
    work = Workload("tiny", **SHAPE, lora=SPEC, strategy="pipeline", microbatches=2)
    with pytest.raises(TPUModelError, match="lora"):
        jax.eval_shape(work.train_step_on(mesh), work.state_shapes(), work.batch_shapes())


@pytest.fixture(scope="module")
def beside_llama(tmp_path_factory):
    """A small Llama in Hugging Face's files, adapters beside it, and the logits of both by us."""
    folder = tmp_path_factory.mktemp("llama")
    config = get_preset("tiny").replace(dtype="float32", param_dtype="float32")
    work = Workload(config, **SHAPE, lora=SPEC)
    variables = work.adapter.init(jax.random.key(3))
    base = noisy(variables.model_state["base"], 4)
    export_huggingface(base, config, folder / "base")
    thin = noisy(variables.params, 5)
    write_peft(thin, SPEC, config, folder / "adapter", base=str(folder / "base"))
    tokens = work.example_batch()["inputs"]
    found = logits(work, thin, {"base": base, "carried": {}}, tokens)
    return folder, config, thin, tokens, np.asarray(found)


def test_peft_reads_what_we_write(beside_llama):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder, _, _, tokens, expected = beside_llama
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(np.array(tokens))).logits.numpy()
    np.testing.assert_allclose(theirs, expected, atol=2e-4 * abs(expected).max())


def test_we_read_what_peft_writes(beside_llama, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from tpukit.training.trained_model import load_trained

    folder, config, _, tokens, _ = beside_llama
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    about = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, about).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(torch.from_numpy(np.array(tokens))).logits.numpy()
    trained = load_trained(tmp_path)
    ours = logits(Workload(config, **SHAPE), trained.params, {}, tokens)
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * abs(theirs).max())


def test_adapters_come_back_to_the_bit(beside_llama):
    folder, config, thin, _, _ = beside_llama
    read = read_peft(folder / "adapter", config)
    jax.tree.map(np.testing.assert_array_equal, read.params, thin)
    assert (read.spec.rank, read.spec.alpha) == (SPEC.rank, SPEC.alpha)
    assert read.base == str(folder / "base")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"r": 8}, "another model"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_adapters_that_are_no_plain_lora(beside_llama, tmp_path, change, words):
    folder, config, *_ = beside_llama
    for file in (folder / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(TPUModelError, match=words):
        read_peft(tmp_path, config)


def test_adapters_of_another_model(beside_llama):
    folder, config, *_ = beside_llama
    with pytest.raises(TPUModelError, match="another model"):
        read_peft(folder / "adapter", config.replace(n_layers=1))
    with pytest.raises(TPUModelError, match="another model"):
        read_peft(folder / "adapter", config.replace(d_ff=64))
