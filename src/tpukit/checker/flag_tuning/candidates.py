"""What a search for compiler options tries: groups of candidates, as data with a source each."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ...compiler.compiled import CompiledStep


@dataclass(frozen=True)
class OptionSet:
    """Options that are tried together.

    Attributes:
        generations: The TPU generations it is for; None for every one.
        reason: What its source says that it does.
    """

    group: str
    label: str
    options: Mapping[str, Any]
    generations: frozenset[str] | None
    reason: str
    source: str

    @property
    def name(self) -> str:
        """Group and label in one."""
        return f"{self.group}: {self.label}"


@dataclass(frozen=True)
class CandidateGroup:
    """Candidates of which at most one is kept.

    Attributes:
        question: What the group decides, as a question.
        needs: What a program must have for the group to matter; "" for nothing.
        unseen: What the prediction cannot see of it, so that its times do not decide.
    """

    name: str
    question: str
    needs: str
    unseen: str
    candidates: tuple[OptionSet, ...]

    def candidates_for(self, generation: str) -> tuple[OptionSet, ...]:
        """The candidates of one TPU generation."""
        return tuple(
            one
            for one in self.candidates
            if one.generations is None or generation in one.generations
        )

    def missing_in(self, compiled: CompiledStep) -> str:
        """Why the group cannot matter to a program, or ""."""
        if not self.needs or _HAS[self.needs](compiled):
            return ""
        return f"it needs {self.needs}, and {compiled.name} on {compiled.slice} has none"


@cache
def load_candidates() -> tuple[CandidateGroup, ...]:
    """The groups that come with tpukit, in the order they are searched."""
    place = resources.files("tpukit.runtime.flags").joinpath("data", "search.toml")
    data = tomllib.loads(place.read_text())
    return tuple(_group(entry, data["sources"]) for entry in data["group"])


def _group(entry: Mapping[str, Any], sources: Mapping[str, str]) -> CandidateGroup:
    return CandidateGroup(
        name=entry["name"],
        question=entry["question"],
        needs=entry.get("needs", ""),
        unseen=entry.get("unseen", ""),
        candidates=tuple(
            OptionSet(
                group=entry["name"],
                label=one["label"],
                options=one["options"],
                generations=frozenset(one["generations"]) if "generations" in one else None,
                reason=one["reason"],
                source=sources[one["source"]],
            )
            for one in entry["candidate"]
        ),
    )


_HAS = {
    "collectives": lambda compiled: bool(compiled.collectives),
    "several slices": lambda compiled: compiled.slice.num_slices > 1,
    "sparse cores": lambda compiled: (
        bool(compiled.collectives) and bool(compiled.slice.chip.sparse_cores.value)
    ),
    "megacore": lambda compiled: (
        compiled.slice.chip.cores_per_chip > compiled.slice.chip.devices_per_chip
    ),
    "host transfers": lambda compiled: bool(compiled.memory.host_bytes),
}
