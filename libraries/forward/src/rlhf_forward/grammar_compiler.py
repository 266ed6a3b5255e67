"""Compiles structures with llguidance in bounded time and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, DataError

from .structure import SCHEMA, Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
_compiler = threading.Lock()
_stack_size = threading.Lock()
"""Held while a thread starts, because the size of stacks is a setting of the process."""


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
