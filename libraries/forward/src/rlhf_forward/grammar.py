"""Grammars over the tokens of one tokenizer, by llguidance (Moskal 2025, https://github.com/guidance-ai/llguidance).

An answer is sampled from the tokens that its grammar allows next. Trainers call the same functions with the sampled
tokens, so that both compute log-probs of the same distribution.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from rlhf_core.errors import ConfigError, DataError

from .structure import SCHEMA, Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

INSTALL = "pip install 'rlhf-forward[structure]'"
COMPILE_SECONDS = 20.0
"""Maximum wait for a grammar to be compiled."""
_STACK_BYTES = 256 * 1024**2
"""Stack of the thread that compiles, since long chains of rules are compiled recursively."""
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of llguidance. A lexer state takes 1 to 2 KiB."""
_REMEMBERED = 64
"""Number of compiled grammars to keep per tokenizer."""
_NUM_PROBED = 512
_compiler = threading.Lock()
_stack_size = threading.Lock()
"""Held while a thread starts, because the size of stacks is a setting of the process."""
_vocabularies: WeakKeyDictionary[Any, dict[frozenset[int], Vocabulary]] = WeakKeyDictionary()


class StructuredAnswer:
    """The tokens that may come next in one answer."""

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
        self._tokens = _read_tokens(tokenizer, sorted(eos_token_ids))
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


def compile_structure(structure: Structure, tokens: Any = None, *, where: str) -> LLMatcher:
    """Compile a structure in bounded time and memory, on a thread whose stack is large enough.

    Args:
        structure: The form of an answer.
        tokens: llguidance's tokenizer. None checks only what does not depend on tokens.
        where: Location for errors.

    Returns:
        The state before the first token.

    Raises:
        ConfigError: llguidance is not installed.
        DataError: The structure is invalid, exceeds a limit, allows no answer, or takes too long.
    """
    llguidance = load_llguidance(where)
    matcher = llguidance.LLMatcher
    sources = {SCHEMA: matcher.grammar_from_json_schema, "regex": matcher.grammar_from_regex}
    done: list[Any] = []

    def work() -> None:
        # One at a time, so that clients cannot occupy all processors. One that takes too long holds the others up.
        if not _compiler.acquire(timeout=COMPILE_SECONDS):
            return
        try:
            limits = llguidance.LLParserLimits(**_LIMITS)
            grammar = sources.get(structure.kind, matcher.grammar_from_lark)(structure.text)
            if tokens is None:
                done.append(matcher.validate_grammar(grammar, None, limits=limits) or None)
                return
            compiled = matcher(tokens, grammar, log_level=0, limits=limits)
            first = compiled.deep_copy()
            is_open = any(first.compute_bitmask())
            problem = compiled.get_error() or first.get_error()
            done.append(problem or (compiled if is_open else "no token of the tokenizer can start an answer"))
        except Exception as error:  # llguidance raises ValueError, and others for misuse
            done.append(str(error))
        finally:
            _compiler.release()

    _run_with_large_stack(work)
    if not done:
        problem = f"was not compiled within {COMPILE_SECONDS:g} seconds"
    elif isinstance(done[0], str):
        problem = f"is invalid: {' '.join(done[0].split()):.300}"
    else:
        compiled: LLMatcher = done[0]
        return compiled
    hint = "correct or simplify it. It may contain what llguidance supports"
    raise DataError(f"the {structure.kind} of the option structure {problem}", where=where, hint=hint)


def _run_with_large_stack(work: Callable[[], None]) -> None:
    """Run `work` on a thread and wait for it, but at most `COMPILE_SECONDS`."""
    thread = threading.Thread(target=work, name="compile-structure", daemon=True)
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(COMPILE_SECONDS)


def load_llguidance(where: str) -> Any:
    """Import llguidance.

    Args:
        where: Location for the error.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        problem = f"structured answers need the package llguidance ({error})"
        raise ConfigError(problem, where=where, hint=INSTALL) from error
    return llguidance


def _read_tokens(tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int]) -> Any:
    where = "the policy's tokenizer"
    llguidance = load_llguidance(where)
    if not eos_token_ids:
        problem = "it has no token that ends an answer, which structured answers need"
        raise ConfigError(problem, where=where, hint="set eos_token in the tokenizer's files")
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(cast("Any", tokenizer), eos_token=eos_token_ids)
    except ValueError as error:
        if not _is_plain(tokenizer):
            problem = f"its tokens are not the bytes of their text, so structured answers do not work with it ({error})"
            raise ConfigError(problem, where=where, hint="use a byte-level tokenizer, as most models have") from error
    wrapper = llguidance.TokenizerWrapper(_PlainTokens(tokenizer, eos_token_ids[0]))
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokenizer), eos_token=eos_token_ids)


def byte_tokens(size: int) -> Any:
    """Return a tokenizer of llguidance whose tokens are bytes, to check grammars without the policy's tokenizer.

    Args:
        size: Number of ids. Those from 256 on are special tokens, so that grammars may name them.

    Raises:
        ConfigError: llguidance is not installed.
    """
    llguidance = load_llguidance("structured answers")
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokens(size)), eos_token=[0])


class _ByteTokens:
    """Bytes and special tokens, in the form of a tokenizer for llguidance."""

    def __init__(self, size: int) -> None:
        self.eos_token_id = 0
        self.bos_token_id: int | None = None
        self.tokens = [bytes([each]) for each in range(256)] + [f"<{each}>".encode() for each in range(256, size)]
        self.special_token_ids = [0, *range(256, size)]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text is the concatenation of its tokens' texts, tried with some pairs of tokens."""
    texts = [str(tokenizer.decode([each])) for each in range(min(len(tokenizer), _NUM_PROBED))]
    ids = range(len(texts))
    return all(
        str(tokenizer.decode([one, two])) == texts[one] + texts[two]
        for one, two in zip(ids, reversed(ids), strict=True)
    )


class _PlainTokens:
    """Tokens whose texts are concatenated, in the form of a tokenizer for llguidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self.special_token_ids = list(tokenizer.all_special_ids)
        self.tokens = [str(tokenizer.decode([each])).encode() for each in range(len(tokenizer))]
        self._unknown = tokenizer.unk_token_id
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        """Encode a text that a grammar allows as the only one. Characters without a token are left out."""
        return [each for each in self._encode(text, add_special_tokens=False) if each != self._unknown]
