"""The main job as far as it exists, the way a user would type it: `make demo` runs this."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPORT = "runs/demo/report.html"
LAYER = [f"{HERE / 'layer.py'}:forward_and_backward", "--on", "v6e-1"]
LAYER_SHAPES = ["bf16[4096,14336]", "bf16[14336,4096]", "bf16[4,2048,4096]"]
TRAINING = ["--on", "v6e-4", "--batch", "16", "--sequence", "2048", "--remat", "full"]

# What a user wants to know, what to type, and the exit code that answers it.
STEPS = (
    ("What is here, and is it healthy?", ["doctor"], 0),
    ("Which slices of Trillium are there?", ["slices", "v6e"], 0),
    ("What does 'v5p-128' mean? (64 chips: v5p names count cores)", ["slice", "v5p-128"], 0),
    (
        "Is this flag safe? (an unknown one would abort the job at start-up)",
        ["flags", "check", "--xla_tpu_enable_data_parallelism=true"],
        2,
    ),
    (
        "Does this layer compile for a v6e, and what does it need? The real TPU compiler says:",
        ["compile", *LAYER, *(word for shape in LAYER_SHAPES for word in ("--arg", shape))],
        0,
    ),
    (
        "Does training Llama 3.2 1B fit on four of them, and how long is a step?",
        ["check", "llama3.2-1b", *TRAINING, "--html", REPORT],
        0,
    ),
)


def main() -> int:
    command = Path(sys.executable).with_name("tpukit")
    environment = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "NO_GCE_CHECK": "true"}
    Path(REPORT).parent.mkdir(parents=True, exist_ok=True)
    for question, arguments, expected in STEPS:
        print(f"\n\033[1m{question}\033[0m\n$ tpukit {' '.join(arguments)}", flush=True)
        code = subprocess.run([command, *arguments], env=environment).returncode
        if code != expected:
            print(f"demo: exit code {code}, expected {expected}", file=sys.stderr)
            return 1
    print(f"\nThe same check as a page: {REPORT}. Next: README.md, or `tpukit --help`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
