"""Rows of a results file as workloads: what a source says is compiled, what is missing is said."""

import copy
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import published_loss
import published_rows
import pytest
from published_rows import NotExpressible, as_run, narrow_scores, reduces_at_once

from tpukit.models.attention.choice import dot_attention
from tpukit.models.loss import next_token_loss
from tpukit.models.remat.policy import RematPolicy
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.parallel.sharding.activations import activation_rules

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "published_results.json"
ROWS = {row["id"]: row for row in json.loads(DATA.read_text())["results"]}


def changed(name, **changes):
    row = copy.deepcopy(ROWS[name])
    for key, value in changes.items():
        row[key] = {**row[key], **value} if isinstance(value, dict) else value
    return row


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "deepseek9"}, "no preset has the architecture of deepseek9"),
        ({"hardware": {"topology": None}}, "topology is not given"),
        ({"hardware": {"gen": "v99"}}, "not a TPU generation"),
        ({"batch": {"global_seqs": None}}, "batch or sequence length is not given"),
        ({"parallelism": "fsdp=4, autoregressive=2"}, "axis called autoregressive"),
        ({"parallelism": "fsdp=16"}, "not a mesh of the 8 devices"),
        ({"optimizer": "lamb"}, "optimizer 'lamb'"),
        ({"remat": "model default"}, "not described well enough"),
        ({"framework": "torchprime"}, "attention is torch_xla's"),
        ({"quantization": "int4"}, "products in 'int4'"),
        ({"config": "partial", "dims": None}, "no decoder, or its dimensions"),
        ({"config": "partial", "batch": {"global_seqs": None}}, "batch is not stated"),
        ({"config": "partial", "remat": None, "notes": "rounded"}, r"part: rounded \(no remat\)"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes, reason):
    with pytest.raises(NotExpressible, match=reason):
        as_run(changed("tri-llama3.1-8b-v6e-8", **changes))


def test_every_decoder_with_a_full_configuration_is_expressed_but_those_of_torch_xla():
    left_out = set()
    for name, row in ROWS.items():
        try:
            as_run(row)
        except NotExpressible:
            left_out.add(name)
    full = {name for name, row in ROWS.items() if row["config"] == "full"}
    assert left_out & full == {"tp-llama3.1-8b-v6e-256", "tp-llama3.1-405b-v6e-256"}


def test_models_of_several_kinds_are_compiled_as_their_recipes_run_them():
    deepseek = as_run(ROWS["iw-deepseek3-fp8-256"])
    config = deepseek.workload.config
    assert config.parameter_count().total == 671_026_419_200  # nothing predicted ahead
    groups = [(layer.router_groups, layer.router_groups_kept) for layer in config.kinds.values()]
    assert groups == [(0, 0), (0, 0)]
    assert (config.matmul, deepseek.mesh) == ("float8_static", {"fsdp": 256, "zero": 2})
    assert as_run(ROWS["iw-gemma4-31b-64"]).mesh == {"fsdp": 128}  # no experts, so one axis does
    assert deepseek.options["xla_tpu_pcie_bandwidth_multiplier"] == 0.03
    assert not as_run(ROWS["iw-deepseek3-bf16-128"]).workload.config.wide_gradients
    # MaxText calls so what experts give row by row.
    oss = as_run(ROWS["iw-gpt-oss-120b-64"]).workload
    assert str(oss.remat) == "offload=decoder_layer_input,expert_rows"
    assert str(as_run(ROWS["iw-gemma4-31b-64"]).workload.remat) == "save=mlpwo,out_proj"
    at_once = {name for name, row in ROWS.items() if reduces_at_once(row)}
    of_recipes = {"iw-deepseek3-bf16-128", "iw-deepseek3-fp8-256", "iw-gpt-oss-120b-64"}
    assert at_once == {*of_recipes, "iw-gemma4-31b-64"}
    by_channel = changed("iw-llama3.1-70b-8k-fp8-64", quantization="fp8_full via Qwix")
    assert as_run(by_channel).workload.config.matmul == "float8_channels"
    assert as_run(by_channel, quantized=True).workload.config.matmul == "dtype"
    assert as_run(changed("v5p-llama4-scout", model="llama4-17b-16e")).workload.config.n_experts


def test_axes_of_a_topology_may_come_in_any_order():
    row = changed(
        "tri-llama3.1-8b-v6e-8", hardware={"gen": "v4", "topology": "8x4x4"}, parallelism="fsdp=-1"
    )
    assert as_run(row).mesh == {"fsdp": 128}


def test_a_source_says_what_is_compiled():
    maxtext = as_run(ROWS["tri-llama3.1-8b-v6e-8"]).workload
    assert (maxtext.loss_chunks, maxtext.attention) == (None, "splash")
    assert maxtext.config.embedding_lookup == "one_hot"
    two_kernels = as_run(ROWS["tri-llama3.1-405b-2xv6e-256"]).workload
    assert two_kernels.attention == "splash in two"
    assert as_run(ROWS["v5p-llama3.1-405b-1024"]).workload.loss_chunks == 4  # vocabulary tiles
    unrolled = as_run(ROWS["wk-q8-cx-8k-bs4"])
    assert not unrolled.workload.scan_layers
    assert unrolled.workload.config.param_dtype == "bfloat16"
    assert as_run(ROWS["mt23-16B-1xv5e-256"]).workload.attention is narrow_scores
    assert as_run(ROWS["iw-llama3.1-70b-128k-bf16-256"]).workload.attention == "ring"
    assert as_run(ROWS["tri-gpt3-175b-int8-v6e-256"]).workload.config.matmul == "int8_throughout"


@pytest.mark.parametrize("policy", published_rows.MAXTEXT_POLICIES)
def test_policies_of_maxtext_are_ours(policy):
    ours = published_rows.read_remat(f"{policy}; capacity_factor 1.25 (dropping)")
    assert str(RematPolicy.parse(ours)) == ours


def test_the_trainers_of_the_log_keep_what_their_code_says():
    llama = as_run(ROWS["wk-ll8-jax-exp13-bs5"])
    assert llama.workload.config.param_dtype == "bfloat16"
    assert llama.workload.loss_chunks is published_loss.blocked_loss
    moments = jax.eval_shape(llama.workload.optimizer.init, jnp.zeros(4, jnp.bfloat16))[0]
    assert (moments.mu.dtype, moments.nu.dtype) == (jnp.float32, jnp.bfloat16)
    qwen = as_run(ROWS["wk-q8-jax-8k-bs2"]).workload
    assert qwen.loss_chunks is published_loss.blocked_loss_of_narrow_head
    assert not qwen.config.wide_gradients
    assert as_run(ROWS["tri-llama3.1-8b-v6e-8"]).workload.config.wide_gradients


def test_whose_attention_kernel_ran():
    for name, maker in (
        ("tri-llama3.1-8b-v6e-8", "jax"),
        ("wk-q8-mt-2k-bs4", "jax"),
        ("wk-ll8-jax-exp27-bs4", "tokamax"),
        ("iw-llama3.1-70b-8k-bf16-64", "tokamax"),
    ):
        assert as_run(ROWS[name]).splash == maker


def test_the_loss_of_maxtext_is_the_loss():
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (2, 8, 24))
    targets = jax.random.randint(keys[1], (2, 8), 0, 24)
    seen, expected = (
        jax.value_and_grad(function)(logits)
        for function in (
            lambda logits: published_loss.loss_of_maxtext(logits, {"targets": targets}).total,
            lambda logits: next_token_loss(logits, targets).total,
        )
    )
    assert jnp.allclose(seen[0], expected[0], rtol=1e-6)
    assert jnp.allclose(seen[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("head", ["float32", "bfloat16"])
def test_a_loss_in_blocks_is_the_loss(head, monkeypatch):
    monkeypatch.setattr(published_loss, "TOKENS", 4)
    monkeypatch.setattr(published_loss, "WORDS", 8)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (8, 8, 16))
    kernel = jax.random.normal(keys[1], (16, 24)).astype(head).astype("float32")
    targets = jax.random.randint(keys[2], (8, 8), 0, 24)
    mesh = create_mesh(mesh_shape=(8,), axis_names=("fsdp",))

    def blocked(x, kernel):
        return published_loss.blocked_loss(x, kernel, targets, head=head).total

    def whole(x, kernel):
        return next_token_loss(x @ kernel, targets).total

    with activation_rules(mesh, "fsdp"):
        seen = jax.jit(jax.value_and_grad(blocked, argnums=(0, 1)))(x, kernel)
    expected = jax.value_and_grad(whole, argnums=(0, 1))(x, kernel)
    (total, (of_x, of_kernel)), (true_total, (true_of_x, true_of_kernel)) = seen, expected
    # The kernel is a bfloat16 one in both cases, so that all but its gradient is exact to float32.
    assert jnp.allclose(total, true_total, rtol=1e-6)
    assert jnp.allclose(of_x, true_of_x, atol=1e-5)
    if head == "float32":
        assert jnp.allclose(of_kernel, true_of_kernel, atol=1e-4)
        return
    # Each device rounds its share to bfloat16 (8 bits), and so is every sum of two shares: three
    # in a row for eight devices, each off by half a unit at most.
    of_share = jax.grad(lambda kernel, x, y: next_token_loss(x @ kernel, y).total)
    shares = jax.vmap(of_share, in_axes=(None, 0, 0))(kernel, x, targets)
    apart = jnp.abs(of_kernel - true_of_kernel)
    assert jnp.all(apart <= 4 * 2.0**-9 * jnp.sum(jnp.abs(shares), axis=0))
    assert jnp.linalg.norm(apart) < 2.0**-8 * jnp.linalg.norm(true_of_kernel)


def test_narrow_scores_are_attention():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 16, heads, 8))
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    )
    assert jnp.allclose(narrow_scores(q, k, v), dot_attention(q, k, v), atol=1e-5)


def test_transfers_to_the_host_are_tried_first_where_a_recipe_means_them_to_be():
    (as_written, first) = as_run(ROWS["iw-gpt-oss-120b-64"]).option_sets
    multiplier = "xla_tpu_pcie_bandwidth_multiplier"
    assert first[multiplier] < as_written[multiplier]
    assert len(as_run(ROWS["iw-llama3.1-70b-8k-bf16-64"]).option_sets) == 1
