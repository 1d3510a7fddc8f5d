"""Decode with tpukit: `python generate_tpukit_program.py REQUEST.json`; prints `REPORT {…}`.

The request names the model, the rows, prompt and new tokens, and whether layers are a loop. With
"export" the weights are written there first, as a Hugging Face folder in bfloat16.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from initial_weights import config_of
from shapes import VOCABULARY

from tpukit.models import export_huggingface
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.generation import Generator, Sampling


def weights(config):
    """Random weights of seed 0, three times as large: likeliest tokens stand out."""
    given = jax.jit(lambda key: TransformerAdapter(config).init(key).params)(jax.random.key(0))
    return jax.tree.map(
        lambda leaf: (leaf * 3 if leaf.ndim > 2 else leaf).astype(jnp.bfloat16), given
    )


def prompts(rows: int, length: int) -> np.ndarray:
    """The same tokens for every program."""
    return np.random.default_rng(0).integers(1, VOCABULARY, (rows, length))


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    config = config_of(asked["model"]).replace(dtype="bfloat16", param_dtype="bfloat16")
    params = weights(config)
    if asked.get("export"):
        export_huggingface(params, config, asked["export"])
        print("REPORT {}")
        return
    generator = Generator(config, params, loop=asked["loop"])
    given = prompts(asked["rows"], asked["prompt"])
    times = []
    for _ in range(1 + asked["repeats"]):  # the first one warms up
        found = generator.generate(
            given, max_new_tokens=asked["new"], sampling=Sampling(temperature=0)
        )
        times.append(found.step_time_s)
    report = {
        "step_s": min(times[1:]),
        "steps_s": times[1:],
        "prompt_s": found.prompt_s,
        "first": [list(row[:32]) for row in found.tokens[:4]],
        "device": jax.devices()[0].device_kind,
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
