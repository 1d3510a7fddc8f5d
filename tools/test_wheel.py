"""Build wheel and sdist, install each in an empty environment, and try what a first user does.

`make test-wheel` does it for Python 3.11, 3.12 and 3.13, where they are found; names as arguments
(`3.12`) choose others.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
# Only what the package itself installs: no extra, no libtpu, no torch.
SMOKE = (
    ("tpukit", "--version"),
    ("tpukit", "--help"),
    ("tpukit", "slices", "v6e", "--json"),
    ("tpukit", "plan", "llama3.1-8b", "--tokens", "1e9", "--on", "v6e-64", "--no-verify", "--json"),
    ("tpukit", "data", "prepare", "corpus.jsonl", "-o", "corpus", "--tokenizer", "bytes"),
    ("tpukit", "train", "tiny", "--data", "corpus", "--steps", "3", "--run-dir", "runs/one"),
    ("tpukit", "generate", "runs/one", "--prompt", "hello", "--max-new-tokens", "3"),
    ("tpukit", "export", "runs/one", "exported"),
    ("tpukit", "report", "html", "--help"),
)
SILENT = "import sys, tpukit; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"


def find_python(version: str) -> str | None:
    """An interpreter of that version: this one, on the PATH, or of pyenv."""
    if "{}.{}".format(*sys.version_info[:2]) == version:
        return sys.executable
    pyenv = Path.home() / ".pyenv" / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def build(folder: Path) -> tuple[Path, Path]:
    """Build wheel and sdist."""
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def try_package(python: str, package: Path, folder: Path) -> str | None:
    """Install a package in an empty environment and use it; what went wrong, if anything did."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    bin_folder = folder / "bin"
    words = [str(bin_folder / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    pinned = ["--constraint", str(ROOT / "constraints.txt"), str(package)]
    if (error := _failure([*words, *pinned], folder)) is not None:
        return f"pip install: {error}"
    if _failure([str(bin_folder / "python"), "-W", "error", "-c", SILENT], folder) is not None:
        return "import tpukit is not silent, or loads jax or torch"
    lines = "".join(f'{{"text": "hello world, line {number}"}}\n' for number in range(300))
    (folder / "corpus.jsonl").write_text(lines)
    for command in SMOKE:
        if (error := _failure([str(bin_folder / command[0]), *command[1:]], folder)) is not None:
            return f"{' '.join(command)}: {error}"
    return None


def _failure(words: list[str], folder: Path) -> str | None:
    environment = {**os.environ, "TPUKIT_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr or done.stdout)[-2000:]


def main(versions: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="tpukit-wheel-") as name:
        folder = Path(name)
        wheel, sdist = build(folder / "dist")
        for version in versions or PYTHONS:
            python = find_python(version)
            if python is None:
                print(f"Python {version}: not found; install it, or name others", file=sys.stderr)
                failed += 1
                continue
            for package in (wheel, sdist) if version == (versions or PYTHONS)[0] else (wheel,):
                started = time.monotonic()
                error = try_package(python, package, folder / f"{version}-{package.suffix[1:]}")
                shutil.rmtree(folder / f"{version}-{package.suffix[1:]}", ignore_errors=True)
                said = "ok" if error is None else f"FAILED: {error}"
                seconds = time.monotonic() - started
                print(f"Python {version}, {package.name}: {said} ({seconds:.0f} s)", flush=True)
                failed += error is not None
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
