"""Tokens of a store, cut into examples that are read by number."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .examples import ConcatenatedExamples, DocumentExamples
from .indexed import Examples, IndexedData
from .stream import DataDescription
from .token_store import TokenStore


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredData(IndexedData):
    """Tokens cut into examples; see `IndexedData` for their order."""

    store: TokenStore
    sequence_length: int
    vocab_size: int | None
    packing: str

    @property
    def examples(self) -> Examples:
        """The tokens, cut."""
        return self._cut

    @cached_property
    def _cut(self) -> Examples:
        cut = DocumentExamples if self.packing == "documents" else ConcatenatedExamples
        return cut(self.store, self.sequence_length, self.vocab_size)

    @property
    def path(self) -> str:
        """Where the tokens are."""
        return self.store.path

    @property
    def example_size(self) -> int:
        """Tokens in an example."""
        return self.sequence_length

    def describe(self) -> DataDescription:
        """What the data are."""
        documents = self.store.documents
        examples = self.examples
        return DataDescription(
            kind=self.store.kind,
            path=self.store.path,
            num_tokens=self.store.num_tokens,
            num_examples=len(examples),
            num_documents=None if documents is None else len(documents) - 1,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            packing=self.packing,
            filled=examples.packing.filled if isinstance(examples, DocumentExamples) else 1.0,
            dtype=self.store.dtype.name,
            largest_token=self.store.largest_token,
            fingerprint=self.store.fingerprint,
        )

    def identity(self) -> dict[str, Any]:
        """What a position depends on."""
        return {
            "kind": "tokens",
            "fingerprint": self.store.fingerprint,
            "sequence_length": self.sequence_length,
            "packing": self.packing,
        }
