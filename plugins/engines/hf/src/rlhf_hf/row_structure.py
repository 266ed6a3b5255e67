"""The structure of a decoding row: the tokens that its grammar allows next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rlhf_core.types import GenerationRequest
from rlhf_forward import Structure, StructuredAnswer, Vocabulary, allowed_logits, structure_of


class RowStructure:
    """The structure of an answer, and how far the answer is."""

    def __init__(self, structure: Structure, answer: StructuredAnswer) -> None:
        self.structure = structure
        self._answer = answer
        self._allowed: bytes | None = None
        self._is_current = False
        """Whether `_allowed` is of the next token."""

    @classmethod
    def of(
        cls, request: GenerationRequest, vocabulary: Callable[[], Vocabulary] | None, *, where: str
    ) -> RowStructure | None:
        """Return the structure of a request, or None if its answer is free. Raises `DataError` if it is invalid."""
        structure = structure_of(request.options, where=where)
        if structure is None:
            return None
        assert vocabulary is not None
        return cls(structure, vocabulary().answer(structure, where=where))

    @property
    def allowed(self) -> bytes | None:
        """The tokens that may come next, as bits (see `StructuredAnswer.allowed`)."""
        if not self._is_current:
            self._allowed, self._is_current = self._answer.allowed(), True
        return self._allowed

    def add(self, token: int) -> None:
        """Append a sampled token."""
        self._answer.add(token)
        self._is_current = False


def structured_logits(logits: Tensor, structures: Sequence[RowStructure | None]) -> Tensor:
    """Return the logits [n, V] without the tokens that the structures of rows do not allow."""
    if not any(structures):
        return logits
    bits = [None if each is None else each.allowed for each in structures]
    return allowed_logits(logits, bits)
