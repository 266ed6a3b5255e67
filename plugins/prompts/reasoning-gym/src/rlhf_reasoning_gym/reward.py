"""The reward `reasoning-gym`: each problem's own verifier.

Some of the library's verifiers evaluate the answer as Python (`eval`, SymPy's parser), which is unsafe in this process.
They run in the sandbox. The others run in this process, which serves only this reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from rlhf_containment.sandbox import Limits, Mode, missing, run_program
from rlhf_core.errors import ConfigError
from rlhf_core.protocols import Reward

from .config import ReasoningGymReward
from .library import make_dataset, runs_answers, score
from .prompts import KEY

_START_SECONDS = 60
"""Extra time for importing the library."""
_MEMORY_BYTES = 4 * 2**30


class ReasoningGym:
    """Scores of the library, from 0 to 1."""

    def __init__(self, *, answer_tag: str | None, seconds_per_answer: float, sandbox: Mode) -> None:
        self._tag = answer_tag
        self._seconds = seconds_per_answer
        self._sandbox = sandbox

    def __call__(self, rollouts: Sequence[Any]) -> list[float]:
        """Score the rollouts. Raise `ValueError` if a sample is not from the prompt source `reasoning-gym`."""
        answers = [self._extract(rollout.completion) for rollout in rollouts]
        problems = [_problem(rollout) for rollout in rollouts]
        scores = [0.0] * len(rollouts)
        sandboxed = []
        for place, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
            if answer is None:
                continue
            task, options = problem["task"], problem["task_options"]
            key = json.dumps(options, sort_keys=True)
            if _runs_answers(task, key):
                sandboxed.append(place)
            else:
                scores[place] = score(_dataset(task, key), task, problem["entry"], answer)
        if sandboxed:
            jobs = [{**problems[place], "answer": answers[place]} for place in sandboxed]
            for place, value in zip(sandboxed, self._score_in_sandbox(jobs), strict=True):
                scores[place] = value
        return scores

    def _extract(self, completion: str) -> str | None:
        """Extract the answer from a completion. None if it lacks the required form."""
        if self._tag is None:
            return completion.strip()
        _, opened, after = completion.rpartition(f"<{self._tag}>")
        inside, closed, _ = after.partition(f"</{self._tag}>")
        return inside.strip() if opened and closed else None

    def _score_in_sandbox(self, jobs: Sequence[Mapping[str, Any]]) -> list[float]:
        seconds = _START_SECONDS + self._seconds * len(jobs)
        limits = Limits(
            timeout_seconds=seconds, cpu_seconds=int(seconds) + 1, memory_bytes=_MEMORY_BYTES, max_processes=32
        )
        order = json.dumps({"seconds": self._seconds, "answers": jobs})
        result = run_program(_program(), order, limits, mode=self._sandbox)
        scores = json.loads(result.output.splitlines()[-1]) if result.succeeded and result.output else None
        if not (isinstance(scores, list) and len(scores) == len(jobs)):
            raise RuntimeError(
                f"the verifier in the sandbox exited with code {result.exit_code} "
                f"{result.stopped_for}: {result.error_output[-500:]}"
            )
        return [float(value) for value in scores]


def _problem(rollout: Any) -> Mapping[str, Any]:
    problem = rollout.metadata.get(KEY)
    if not isinstance(problem, Mapping):
        raise ValueError(
            f"sample {rollout.sample_id} is not from reasoning-gym: its metadata lacks {KEY!r}. "
            "Use `prompts: {name: reasoning-gym, task: …}`."
        )
    return problem


@cache
def _dataset(task: str, options: str) -> Any:
    return make_dataset(task, json.loads(options))


@cache
def _runs_answers(task: str, options: str) -> bool:
    return runs_answers(task, json.loads(options))


@cache
def _program() -> str:
    """Source of both modules as one program, since the sandbox cannot import this project."""
    here = files(__package__)
    library = (here / "library.py").read_text(encoding="utf-8")
    # Use one thread, because the sandbox limits the number of threads and their address space.
    first = "from __future__ import annotations\nimport os\nos.environ['OPENBLAS_NUM_THREADS'] = '1'\n"
    rest = library.replace("from __future__ import annotations\n", "")
    return first + rest + (here / "shut_in.py").read_text(encoding="utf-8")


def build(config: ReasoningGymReward, context: object) -> Reward:
    """Build the reward. Raise `ConfigError` if this machine does not support the selected sandbox."""
    if problem := missing(config.sandbox):
        other = "set sandbox: landlock (weaker)" if config.sandbox == "namespaces" else "use a newer Linux"
        raise ConfigError(problem, where="reasoning-gym", hint=f"allow user namespaces, or {other}")
    return ReasoningGym(
        answer_tag=config.answer_tag, seconds_per_answer=config.seconds_per_answer, sandbox=config.sandbox
    )
