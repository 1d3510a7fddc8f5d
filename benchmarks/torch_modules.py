"""Every module of the zoo, forward and backward, against eager torch on the CPU in float32.

python benchmarks/torch_modules.py [words of a name …]
"""

import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from claims import Claim, report
from torch_zoo import ZOO, compare


def main(words: list[str]) -> int:
    chosen = [
        one
        for one in ZOO
        if all(word.lower() in f"{one.kind}: {one.name}".lower() for word in words)
    ]
    verdicts: Counter[str] = Counter()
    kind = ""
    for entry in chosen:
        if entry.kind != kind:
            kind = entry.kind
            print(f"\n{kind}")
        outcome = compare(entry)
        verdicts[outcome.verdict] += 1
        told = outcome.note if outcome.verdict != "equal" or outcome.error > 1e-5 else ""
        print(f"  {entry.name:<50} {outcome.verdict:<13} {outcome.error:8.1e}  {told}", flush=True)
    print()
    for verdict, count in verdicts.most_common():
        print(f"{verdict:<14} {count:4}")
    rate = 100 * verdicts["equal"] / max(len(chosen), 1)
    report(
        Claim(f"of {len(chosen)} torch modules, equal to eager torch", rate, "%", at_least=98),
        Claim("silently wrong or with an unnamed error", verdicts["WRONG"], "modules", at_most=0.5),
    )
    return verdicts["WRONG"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
