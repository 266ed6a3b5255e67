"""Grammars over the tokens of one tokenizer, by llguidance (Moskal 2025, https://github.com/guidance-ai/llguidance).

An answer is sampled from the tokens that its grammar allows next. Trainers call the same functions with the sampled
tokens, so that both compute log-probs of the same distribution.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .grammar_compiler import compile_structure
from .grammar_tokens import read_tokens
from .structure import Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

_REMEMBERED = 64
"""Number of compiled grammars to keep per tokenizer."""
_vocabularies: WeakKeyDictionary[Any, dict[frozenset[int], Vocabulary]] = WeakKeyDictionary()


class StructuredAnswer:
    """The tokens that may come next in one answer.

    Args:
        matcher: State of the grammar. The answer changes it.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes | None:
        """Return the tokens that may come next, one bit for each id, from the lowest bit of each byte.

        Ends of the answer are among them if it may end here. Of a text that is the only one to follow, only the
        tokenizer's own tokens are allowed. None if the grammar exceeds a limit at this place.
        """
        bits: bytes = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() or not any(bits) else bits

    def add(self, token_id: int) -> None:
        """Append an allowed token.

        Args:
            token_id: Its id.
        """
        self._matcher.consume_token(token_id)


class Vocabulary:
    """The tokens of one tokenizer as bytes, and the grammars compiled for them. Its methods may run on any thread.

    Example:
        answer = vocabulary_of(tokenizer, [tokenizer.eos_token_id]).answer(Structure("regex", "yes|no"), where="here")
        allowed = answer.allowed()
        answer.add(token_id)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> None:
        """Read the tokens, which takes about a second for a large vocabulary.

        Args:
            tokenizer: The policy's tokenizer.
            eos_token_ids: Ids that end an answer.

        Raises:
            ConfigError: llguidance is not installed, or the tokenizer does not map ids to bytes.
        """
        self.size = len(tokenizer)
        self._tokens = read_tokens(tokenizer, sorted(eos_token_ids))
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def is_compiled(self, structure: Structure) -> bool:
        """Whether a structure was compiled, and is still kept.

        Args:
            structure: The form of an answer.
        """
        with self._lock:
            return structure in self._compiled

    def answer(self, structure: Structure, *, where: str) -> StructuredAnswer:
        """Return the state before the first token of an answer.

        Args:
            structure: The form of the answer.
            where: Location for the error.

        Raises:
            DataError: The structure is invalid, too large, allows no answer, or takes too long to compile.
        """
        with self._lock:
            compiled = self._compiled.get(structure)
        if compiled is None:  # without the lock, so that other answers do not wait
            compiled = compile_structure(structure, self._tokens, where=where)
        with self._lock:
            self._compiled[structure] = compiled
            self._compiled.move_to_end(structure)
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
            return StructuredAnswer(compiled.deep_copy())


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> Vocabulary:
    """Return the vocabulary of a tokenizer, the same object for the same tokenizer.

    Args:
        tokenizer: The policy's tokenizer.
        eos_token_ids: Ids that end an answer.

    Raises:
        ConfigError: As for `Vocabulary`.
    """
    known = _vocabularies.setdefault(tokenizer, {})
    ends = frozenset(eos_token_ids)
    if ends not in known:
        known[ends] = Vocabulary(tokenizer, ends)
    return known[ends]
