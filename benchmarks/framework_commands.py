"""Commands of other people's trainers, as their users type them, with stand-in data.

The step of a trainer depends on shapes and settings, not on the words it reads. A made-up corpus
with a vocabulary of the same size replaces the corpus of the published run, in the trainer's own
format.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCUMENTS, WORDS_PER_DOCUMENT = 300, 1000
SPECIAL = ("<unk>", "<s>", "</s>")
# Loads a module of an experiment, which registers an optimizer with Levanter, and then starts
# Levanter's own trainer. Modules that start runs on Marin's cluster are replaced by empty ones.
LAUNCHER = """\
import importlib.abc, importlib.machinery, importlib.util, runpy, sys, types

class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, *args, **kwargs): return self
    def __getattr__(self, name): return self

class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("marin", "experiments"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: Anything
        return module
    def exec_module(self, module): pass

sys.meta_path.append(Empty())  # the last, so that modules that are there come first
for path in sys.argv.pop(1).split(","):
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
if hasattr(module, "AdamaxConfig"):  # it registers itself when it is built, which is too late
    module.OptimizerConfig.register_subclass("adamax")(module.AdamaxConfig)
runpy.run_module("levanter.main.train_lm", run_name="__main__")
"""


@dataclass(frozen=True)
class TrainerCommand:
    """What is typed behind `tpukit check … --`.

    Attributes:
        words: The command.
        folder: The folder it runs in.
        environment: Variables that its recipe sets.
    """

    words: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return shlex.join(self.words)


def command_of(
    row: Mapping[str, Any],
    python: str,
    folder: Path,
    *,
    code: Path | None = None,
    trainer: str = "",
) -> TrainerCommand:
    """Return the command of a row; its files are written into a folder.

    Args:
        row: A row of data/captured_frameworks.json.
        python: The interpreter of the framework's environment.
        folder: Gets configuration and stand-in data.
        code: A checkout that has the files which a row names as its `code`.
        trainer: The package and its version, because Levanter's configuration has changed.
    """
    if row["framework"] == "maxtext":
        return _maxtext(row, python, folder)
    config = levanter_config(row, folder, old=trainer.startswith("levanter "))
    return _levanter(row, python, folder, config, code)


def _maxtext(row: Mapping[str, Any], python: str, folder: Path) -> TrainerCommand:
    settings = {
        "run_name": "captured",
        "base_output_directory": str(folder / "output"),
        "model_name": row["model"],
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "steps": 20,
        **row["settings"],
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    flags = " ".join(row["flags"])
    module = "maxtext.trainers.pre_train.train"
    return TrainerCommand(
        [python, "-m", module, *words], folder, {"LIBTPU_INIT_ARGS": flags} if flags else {}
    )


def levanter_config(row: Mapping[str, Any], folder: Path, *, old: bool) -> dict[str, Any]:
    """Return the configuration of a row, with a stand-in corpus; `old` is the format of 2025."""
    data = folder / f"words-{row['vocabulary']}"
    write_corpus(data, row["vocabulary"])
    tokenizer, texts = str(data / "tokenizer"), [str(data / "train.jsonl")]
    source = {"main": {"source": {"type": "url", "train_urls": texts}}}
    model = {**row["model"], "reference_checkpoint": tokenizer, "tokenizer": tokenizer}
    if old:
        model["seq_len"] = model.pop("max_seq_len")
    return {
        "data": {
            "tokenizer": tokenizer,
            "cache_dir": str(data / ("cache-2025" if old else "cache")),
            "shuffle": False,
            **({"train_urls": texts} if old else {"components": source}),
        },
        "model": model,
        **({} if old else {"train_seq_len": row["sequence"]}),
        "optimizer": row["optimizer"],
        "trainer": {
            "tracker": {"type": "noop"},
            "mp": "p=f32,c=bfloat16",
            "train_batch_size": row["batch"],
            "num_train_steps": row["steps"],
            "checkpointer": {"base_path": str(folder / "checkpoints")},
        },
    }


def _levanter(
    row: Mapping[str, Any], python: str, folder: Path, config: Mapping[str, Any], code: Path | None
) -> TrainerCommand:
    path = folder / f"{row['name'].replace('/', '-')}.yaml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML, too
    arguments = ["--config_path", str(path)]
    # Blocks of the loss are timed on devices unless that is off, and nothing here has a time.
    untimed = {"LEVANTER_PALLAS_CE_AUTOTUNE_ON_MISS": "0"}
    if "code" not in row:
        words = [python, "-m", "levanter.main.train_lm", *arguments]
        return TrainerCommand(words, folder, untimed)
    if code is None:
        raise FileNotFoundError(f"{row['name']} needs {', '.join(row['code'])}; give --code")
    launcher = folder / "launch.py"
    launcher.write_text(LAUNCHER)
    return TrainerCommand([python, str(launcher), ",".join(row["code"]), *arguments], code, untimed)


def write_corpus(folder: Path, vocabulary: int) -> None:
    """Write documents of made-up words and a tokenizer with that many words, once."""
    done = folder / "train.jsonl"
    if done.exists():
        return
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *(f"w{number}" for number in range(vocabulary - len(SPECIAL)))]
    added = [
        {
            "id": number,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, text in enumerate(SPECIAL)
    ]
    model = {
        "type": "WordLevel",
        "vocab": {w: n for n, w in enumerate(words)},
        "unk_token": "<unk>",
    }
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    split = {"type": "WhitespaceSplit"}
    file = {
        "version": "1.0",
        **empty,
        "added_tokens": added,
        "pre_tokenizer": split,
        "model": model,
    }
    (tokenizer / "tokenizer.json").write_text(json.dumps(file))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
    (tokenizer / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": vocabulary})
    )
    lines = []
    for number in range(DOCUMENTS):
        text = " ".join(
            words[3 + (number * 7919 + at * 104729) % (vocabulary - 3)]
            for at in range(WORDS_PER_DOCUMENT)
        )
        lines.append(json.dumps({"text": text}))
    done.write_text("\n".join(lines) + "\n")
