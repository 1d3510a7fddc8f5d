"""Vocabularies of the models room that may be written in one file only."""

import ast
from pathlib import Path

import tpukit
from tpukit.models import defaults
from tpukit.models.remat import policy

SRC = Path(tpukit.__file__).parent
# "none" and "names" are ordinary words, and other options have values of that name.
POLICIES = {policy.FULL, policy.MINIMAL, policy.DOTS, policy.EVERYTHING, policy.NOTHING_SAVEABLE}
LENGTHS = {
    value for name, value in vars(defaults).items() if name.isupper() and isinstance(value, int)
}


def trees(besides):
    for path in sorted(SRC.rglob("*.py")):
        if path != Path(besides.__file__):
            text = path.read_text()
            yield path.relative_to(SRC), text, ast.parse(text)


def test_names_of_remat_policies_are_written_in_one_file():
    """Adding a policy changes `models/remat/policy.py`; other files import its names."""
    found = [
        f"{path}:{node.lineno} {node.value!r}"
        for path, text, tree in trees(besides=policy)
        if "remat" in text.lower() and "torch_module" not in str(path)
        # Kernels have no policies; "full" is a kind of attention mask in their cases.
        if path.parts[0] != "kernels"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in POLICIES
    ]
    assert not found


def test_default_sequence_lengths_are_written_in_one_file():
    def targets(node):
        if isinstance(node, ast.Assign):
            return [t.id for t in node.targets if isinstance(t, ast.Name)], node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            return [node.target.id], node.value
        return [], None

    def defaulted(function):
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        given = len(positional) - len(arguments.defaults)
        yield from zip(positional[given:], arguments.defaults, strict=True)
        yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)

    found: list[str] = []
    for path, _, tree in trees(besides=defaults):
        for node in ast.walk(tree):
            names, value = targets(node)
            pairs = [(name, value) for name in names]
            if isinstance(node, ast.FunctionDef):
                pairs = [(argument.arg, default) for argument, default in defaulted(node)]
            found += [
                f"{path}:{node.lineno} {name}"
                for name, value in pairs
                if isinstance(value, ast.Constant) and value.value in LENGTHS
                if name.lower().endswith(("sequence_length", "context", "max_seq_len"))
                if name != "original_max_seq_len"  # what a checkpoint was trained with
            ]
    assert not found
