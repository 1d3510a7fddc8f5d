import sys
from pathlib import Path

# Benchmarks are scripts: they import each other from their own folder.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
