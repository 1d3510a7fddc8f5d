"""Run benchmarks, then print every bar and rewrite the pages that state figures.

make bench                       a set that takes about five minutes
make bench RUN="commands plan"   every command of these scripts
make bench RUN=all               every script: hours, and some need a GPU
make bench RUN=none              only print the bars
"""

import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tools"))

import figures

# What needs neither a GPU nor long compiles.
QUICK = (
    "commands startup",
    "plan speed",
    "plan published",
    "plan layouts --recorded",
    "predict score --recorded",
    "captured frameworks --recorded",
    "models compile",
    "serve --no-compile",
    "fp8 report",
    "kernels tuned",
)


def scripts() -> dict[str, list[str]]:
    """Return the subcommands of every script, read from its source."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        calls = [
            node.args[0].value
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "Subcommand"
            and isinstance(node.args[0], ast.Constant)
        ]
        if calls:
            found[path.stem] = calls
    return found


def run(line: str) -> bool:
    """Run one command of a benchmark; return whether it ran to its end."""
    script, *words = line.split()
    print(f"\n== {line}", flush=True)
    command = [sys.executable, str(HERE / f"{script}.py"), *words]
    return subprocess.run(command, cwd=HERE.parent).returncode == 0


def main(names: list[str]) -> int:
    """Run the named scripts and print all bars; return the number of commands that failed."""
    known = scripts()
    if unknown := [name for name in names if name not in (*known, "all", "none")]:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    lines = list(QUICK)
    if names:
        chosen = known if "all" in names else [name for name in names if name != "none"]
        lines = [f"{name} {command}".strip() for name in chosen for command in known[name]]
    failed = [line for line in lines if not run(line)]
    print()
    for script, what, text, target, verdict, date, _ in figures.bar_rows():
        print(f"{script:<16} {what[:76]:<76} {text:>16} {target:>10} {verdict:<6} {date}")
    figures.main([])
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
