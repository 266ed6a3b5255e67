"""`code-execution`: whether the program in the answer passes the sample's tests."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from rlhf_containment.sandbox import Limits, Mode, missing, run_program
from rlhf_core.errors import ConfigError
from rlhf_core.protocols import Reward

from .config import CodeExecutionConfig

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TOKEN_LENGTH = 32
_WITH_ASSERTIONS = """\
def _run(source):
    import linecache, secrets
    del globals()["_run"]
    say, token = print, secrets.token_hex({half})
    linecache.cache["<answer>"] = len(source), None, source.splitlines(True), "<answer>"
    say(token, flush=True)
    exec(compile(source, "<answer>", "exec"), globals())
    say(token, flush=True)
_run({source!r})
"""
"""Prints a token before the answer runs and again after all assertions passed.

The token is created in the process, so no file that the answer can read contains it.
"""
_log = logging.getLogger("rlhf.rewards")


def code_execution(
    rollouts: Sequence[Any],
    *,
    allow_execution: bool = False,
    limits: Limits | None = None,
    sandbox: Mode = "namespaces",
    partial_credit: bool = False,
    tests_key: str = "tests",
) -> list[float]:
    """1 if the Python program in the completion (its last fenced block, or all of it) passes its tests, else 0.

    The tests are in the sample's metadata under `tests_key`: a list of `{"input": …, "output": …}`, each a run that
    must print that output, or Python source with assertions (or a list of such), run after the program in its process.
    Without tests, the program must print the sample's `answer`. A program can detect assertions and cheat, in ways that
    the plugin's page lists, so input and output are safer. `rlhf_containment.sandbox` documents the sandbox.

    Args:
        rollouts: samples to score.
        allow_execution: must be true.
        limits: limits of one program run.
        sandbox: isolation of the program.
        partial_credit: score the share of passed tests, in [0, 1].
        tests_key: metadata key of a sample's tests.

    Raises:
        PermissionError: if `allow_execution` is false.
        ValueError: if a sample lacks tests or one of them is malformed.
    """
    if not allow_execution:
        raise PermissionError(
            "code-execution runs programs that a model wrote: set allow_execution: true to confirm this"
        )
    limits = limits or Limits()
    scores = []
    for rollout in rollouts:
        program = program_in(rollout.completion)
        passed = [_passes(program, test, limits, sandbox) for test in _tests(rollout, tests_key)]
        scores.append(sum(passed) / len(passed) if partial_credit else float(all(passed)))
    return scores


def program_in(completion: str) -> str:
    r"""Return the last fenced code block, or the whole text if it contains none.

    Example:
        >>> program_in("The sum:\n```python\nprint(1 + 2)\n```")
        'print(1 + 2)\n'
    """
    blocks = _FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def _tests(rollout: Any, tests_key: str) -> list[Mapping[str, str] | str]:
    tests = rollout.metadata.get(tests_key)
    if tests is None and rollout.answer is not None:
        return [{"input": "", "output": str(rollout.answer)}]
    tests = [tests] if isinstance(tests, str | Mapping) else tests
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"sample {rollout.sample_id} needs tests: metadata `{tests_key}`, or an answer to print")
    for test in tests:
        if not isinstance(test, str) and not (isinstance(test, Mapping) and "output" in test):
            raise ValueError(f"sample {rollout.sample_id}: a test is Python source or has `output`, got {test!r:.80}")
    return list(tests)


def _passes(program: str, test: Mapping[str, str] | str, limits: Limits, sandbox: Mode) -> bool:
    if isinstance(test, str):
        source = _WITH_ASSERTIONS.format(half=_TOKEN_LENGTH // 2, source=f"{program}\n\n{test}\n")
        result = run_program(source, "", limits, mode=sandbox)
        token, _, printed = result.output.partition("\n")
        # A program that only exits with 0 does not print the token again.
        return result.succeeded and len(token) == _TOKEN_LENGTH and printed.rstrip().endswith(token)
    result = run_program(program, str(test.get("input", "")), limits, mode=sandbox)
    return result.succeeded and _lines(result.output) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    """Lines without trailing white space or trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def build(config: CodeExecutionConfig, context: object) -> Reward:
    """Return the reward with its options. Raises `ConfigError` if this machine does not support the sandbox."""
    if problem := missing(config.sandbox):
        raise ConfigError(problem, where="code-execution", hint=_sandbox_hint(config.sandbox))
    if config.sandbox == "landlock":
        _log.warning(
            "code-execution: the weaker sandbox `landlock`: a program's folder is on disk without a limit on its total "
            "size, and memory and processor time are limited per process only"
        )
    same_name = {limit.name for limit in fields(Limits)}
    return partial(
        code_execution,
        allow_execution=config.allow_execution,
        limits=Limits(timeout_seconds=config.timeout_seconds_per_test, **config.model_dump(include=same_name)),
        sandbox=config.sandbox,
        partial_credit=config.partial_credit,
        tests_key=config.tests_key,
    )


def _sandbox_hint(sandbox: Mode) -> str:
    if sandbox == "namespaces" and missing("landlock") is None:
        return "allow user namespaces on this machine, or set sandbox: landlock for the weaker mode"
    return "run it on Linux as an ordinary user who may create user namespaces"
