"""Decode with transformers: `python generate_transformers_program.py REQUEST.json`.

With a static cache and torch.compile(mode="reduce-overhead"), once through `generate` and once in a
bare loop around the compiled forward pass; the faster of the two is what counts.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from shapes import VOCABULARY
from transformers import AutoModelForCausalLM, StaticCache


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def bare_loop(model, given, new: int, compiled: bool):
    """Seconds of a decode step, and the tokens: argmax on the device, nothing read in between."""
    rows, length = given.shape
    cache = StaticCache(config=model.config, max_cache_len=length + new)

    def one(token, position):
        logits = model(
            token, position_ids=position[None].expand(rows, 1), cache_position=position,
            past_key_values=cache, use_cache=True,
        ).logits  # fmt: skip
        return logits[:, -1].argmax(-1)[:, None]

    with torch.inference_mode():
        logits = model(
            given, cache_position=torch.arange(length, device=given.device),
            past_key_values=cache, use_cache=True,
        ).logits  # fmt: skip
        token = logits[:, -1].argmax(-1)[:, None]
        step = torch.compile(one, mode="reduce-overhead", fullgraph=True) if compiled else one
        position = torch.tensor([length], device=given.device)
        made = [token.clone()]
        warm = min(8, new // 4)
        started = 0.0
        for count in range(new - 1):
            if count == warm:
                started = synchronized()
            token = step(token, position).clone()
            made.append(token)
            position = position + 1
        seconds = (synchronized() - started) / (new - 1 - warm)
    return seconds, torch.cat(made, dim=1)


def through_generate(model, given, new: int) -> float:
    """Seconds of a decode step of `generate` itself: what more tokens add, over how many."""

    def run(count: int) -> float:
        started = synchronized()
        with torch.inference_mode():
            model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count,
                min_new_tokens=count, do_sample=False, pad_token_id=0,
                cache_implementation="static",
            )  # fmt: skip
        return synchronized() - started

    few = max(2, new // 8)
    for count in (new, few):  # compiles, and records graphs
        run(count)
        run(count)
    return (run(new) - run(few)) / (new - few)


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        asked["folder"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    numbers = np.random.default_rng(0).integers(1, VOCABULARY, (asked["rows"], asked["prompt"]))
    given = torch.from_numpy(numbers).to(device)
    compiled = device == "cuda"
    found, tokens, problems = {}, None, {}
    try:
        runs = [bare_loop(model, given, asked["new"], compiled) for _ in range(asked["repeats"])]
        found["loop"], tokens = min(seconds for seconds, _ in runs), runs[0][1]
    except Exception as error:  # noqa: BLE001  the other way is still measured
        problems["loop"] = f"{type(error).__name__}: {str(error)[:300]}"
    try:
        found["generate"] = through_generate(model, given, asked["new"])
    except Exception as error:  # noqa: BLE001
        problems["generate"] = f"{type(error).__name__}: {str(error)[:300]}"
    report = {
        "step_s": min(found.values()) if found else None,
        "ways": found,
        "problems": problems,
        "first": [] if tokens is None else tokens[:4, :32].tolist(),
        "versions": {"torch": torch.__version__},
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
