"""One small run per framework that tests install, as its users start it."""

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np

keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.mixed_precision.set_global_policy("mixed_bfloat16")
model = keras.Sequential(
    [keras.Input((2048,)), *(keras.layers.Dense(2048, activation="relu") for _ in range(4))]
)
model.compile(optimizer="adam", loss="mse")
x = np.zeros((16384, 2048), np.float32)
model.fit(x, x, batch_size=8192, epochs=1)
"""

# Fine-tuning with LoRA: most of what the step takes is frozen.
TUNIX = """
import jax, numpy as np, optax, qwix
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer, utils

mesh = jax.make_mesh(
    (jax.device_count(), 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
config = llama.ModelConfig(
    num_layers=2, vocab_size=32000, embed_dim=1024, hidden_dim=2048, num_heads=8, head_dim=128,
    num_kv_heads=4, rope_theta=500_000, norm_eps=1e-5,
)
model = llama.Llama3(config, rngs=nnx.Rngs(params=0))
model = qwix.apply_lora_to_model(
    model, qwix.LoraProvider(module_path=".*q_proj|.*kv_proj|.*gate_proj", rank=16, alpha=2.0),
    **model.get_model_input(),
)
with mesh:
    state = nnx.state(model)
    placed = jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))
    nnx.update(model, placed)
trainer = peft_trainer.PeftTrainer(
    model, optax.adamw(1e-4), peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=4)
).with_gen_model_input_fn(lambda x: {
    "input_tokens": x.input_tokens, "input_mask": x.input_mask,
    "positions": utils.build_positions_from_mask(x.input_mask),
    "attention_mask": utils.make_causal_attn_mask(x.input_mask),
})
rows = 2 * jax.device_count()
batch = peft_trainer.TrainingInput(
    input_tokens=np.ones((rows, 512), np.int32), input_mask=np.ones((rows, 512), bool)
)
with mesh:
    trainer.train([batch] * 4)
"""

LEVANTER_ROW = {
    "name": "tiny",
    "framework": "levanter",
    "on": "v5p-8",
    "batch": 32,
    "sequence": 1024,
    "steps": 10,
    "vocabulary": 4096,
    "model": {
        "type": "llama",
        "max_seq_len": 1024,
        "hidden_dim": 512,
        "intermediate_dim": 1024,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "optimizer": {"type": "adam", "learning_rate": 0.001},
}

MAXTEXT_ROW = {
    "name": "tiny",
    "framework": "maxtext",
    "on": "v6e-8",
    "model": "default",
    "flags": ["--xla_tpu_scoped_vmem_limit_kib=65536"],
    "settings": {
        "per_device_batch_size": 2,
        "max_target_length": 1024,
        "base_emb_dim": 512,
        "base_mlp_dim": 1024,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "base_num_decoder_layers": 2,
        "vocab_size": 4096,
        "attention": "flash",
        "ici_fsdp_parallelism": -1,
    },
}
