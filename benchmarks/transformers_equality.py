"""Every Hugging Face type that is read, against `transformers` itself, on the CPU in float32.

    python benchmarks/transformers_equality.py [words of a name …]

For tiny random configurations of each type with the same weights: the largest difference of
logits, whether greedy tokens are equal one by one (ours with its cache, theirs without one that
could be wrong), and whether `transformers` reads what we write and gives the same.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from claims import Claim, report
from huggingface_models import MODELS, VOCABULARY, greedy_tokens, logits_of, make_model

from tpukit.models import export_huggingface, import_huggingface
from tpukit.models.generation import Generator, Sampling
from tpukit.models.huggingface.weights import ImportedModel

LENGTH, PROMPTS, NEW = 24, (5, 11), 16
BOUND = 1e-5  # of the largest logit, or of 1 where that is less


@dataclass(frozen=True)
class Row:
    """One type.

    Attributes:
        logits: Largest difference, as a share of the largest logit or of 1.
        tokens: Whether greedy tokens are equal; None where theirs are of another model.
        export: Largest difference of what transformers makes of our files; None: not read.
    """

    name: str
    type: str
    logits: float
    tokens: bool | None
    export: float | None

    @property
    def equal(self) -> bool:
        """Whether everything is."""
        read = self.export is not None and self.export <= BOUND
        return self.logits <= BOUND and self.tokens is not False and read

    def __str__(self) -> str:
        said = {True: "equal", False: "DIFFERENT", None: "(*)"}[self.tokens]
        export = "NOT READ" if self.export is None else f"{self.export:.1e}"
        return f"{self.name:<22} {self.type:<20} {self.logits:9.1e}  {said:<10} {export:>9}"


def compare(name: str, folder: Path) -> Row:
    """Make, read, run, generate, write and read again."""
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))
    theirs = make_model(name)
    theirs.save_pretrained(folder / "theirs")
    expected = logits_of(theirs, tokens)
    scale = max(1.0, float(abs(expected).max()))
    read = import_huggingface(folder / "theirs")
    ours = ImportedModel(read.config.replace(dtype="float32"), read.params)
    module = ours.module()
    found = np.asarray(jax.jit(lambda ids: module(ids))(jnp.asarray(tokens)))

    prompts = [row[:length] for row, length in zip(tokens, PROMPTS, strict=True)]
    new = Generator(ours.config, ours.params).generate(
        prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0)
    )
    # With longrope transformers changes frequencies as a sequence grows past the original length.
    changes = "longrope" in json.dumps(ours.config.to_dict())
    same = None
    if not changes:
        same = new.tokens == tuple(greedy_tokens(theirs, prompt, NEW) for prompt in prompts)

    export_huggingface(ours.params, ours.config, folder / "ours")
    back, problems = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "ours", attn_implementation="eager", output_loading_info=True
    )
    again = None
    if not any(problems.values()):
        again = float(abs(logits_of(back.eval(), tokens) - expected).max()) / scale
    return Row(
        name, theirs.config.model_type, float(abs(found - expected).max()) / scale, same, again
    )


def main(words: list[str]) -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = [name for name in MODELS if all(word.lower() in name.lower() for word in words)]
    print(f"{'model':<22} {'type':<20} {'logits':>9}  {'greedy':<10} {'export':>9}")
    rows: list[Row] = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, Path(folder)))
        print(rows[-1], flush=True)
        jax.clear_caches()
    print("(*) longrope: transformers changes frequencies while it generates")
    equal = sum(row.equal for row in rows)
    report(
        Claim(
            f"of {len(rows)} configurations, equal to transformers", equal, "", at_least=len(rows)
        ),
        Claim("types among them", len({row.type for row in rows}), ""),
        Claim("largest difference of logits", max(row.logits for row in rows), "", at_most=BOUND),
    )
    return len(rows) - equal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
