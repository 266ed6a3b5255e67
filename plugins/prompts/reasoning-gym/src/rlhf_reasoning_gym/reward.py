"""The reward `reasoning-gym`: each problem's own verifier.

Some of the library's verifiers evaluate the answer as Python (`eval`, SymPy's parser), and what a model wrote must
not be run here: those run in the sandbox, the others in this process, which serves this reward alone.
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
    """Scores from 0 to 1, as the library gives them."""

    def __init__(self, *, answer_tag: str | None, seconds_per_answer: float, sandbox: Mode) -> None:
        self._tag = answer_tag
        self._seconds = seconds_per_answer
        self._sandbox = sandbox

    def __call__(self, rollouts: Sequence[Any]) -> list[float]:
        """Score the rollouts. Raises `ValueError` on a sample that is not from the prompt source `reasoning-gym`."""
        answers = [self._read(rollout.completion) for rollout in rollouts]
        problems = [_problem(rollout) for rollout in rollouts]
        scores = [0.0] * len(rollouts)
        shut_in = []
        for place, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
            if answer is None:
                continue
            task, options = problem["task"], problem["task_options"]
            key = json.dumps(options, sort_keys=True)
            if _runs_answers(task, key):
                shut_in.append(place)
            else:
                scores[place] = score(_dataset(task, key), task, problem["entry"], answer)
        if shut_in:
            jobs = [{**problems[place], "answer": answers[place]} for place in shut_in]
            for place, value in zip(shut_in, self._in_sandbox(jobs), strict=True):
                scores[place] = value
        return scores

    def _read(self, completion: str) -> str | None:
        """The answer in a completion; None if it lacks the required form."""
        if self._tag is None:
            return completion.strip()
        _, opened, after = completion.rpartition(f"<{self._tag}>")
        inside, closed, _ = after.partition(f"</{self._tag}>")
        return inside.strip() if opened and closed else None

    def _in_sandbox(self, jobs: Sequence[Mapping[str, Any]]) -> list[float]:
        seconds = _START_SECONDS + self._seconds * len(jobs)
        limits = Limits(
            timeout_seconds=seconds, cpu_seconds=int(seconds) + 1, memory_bytes=_MEMORY_BYTES, max_processes=32
        )
        order = json.dumps({"seconds": self._seconds, "answers": jobs})
        result = run_program(_program(), order, limits, mode=self._sandbox)
        scores = json.loads(result.output.splitlines()[-1]) if result.succeeded and result.output else None
        if not (isinstance(scores, list) and len(scores) == len(jobs)):
            raise RuntimeError(
                f"the verifier ended in the sandbox with exit code {result.exit_code} "
                f"{result.stopped_for}: {result.error_output[-500:]}"
            )
        return [float(value) for value in scores]


def _problem(rollout: Any) -> Mapping[str, Any]:
    problem = rollout.metadata.get(KEY)
    if not isinstance(problem, Mapping):
        raise ValueError(
            f"sample {rollout.sample_id} is no problem of reasoning-gym: its metadata has no {KEY!r}; "
            "take the prompts from `prompts: {name: reasoning-gym, task: …}`"
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
    """Source of both modules as one program: the sandbox cannot import this project."""
    here = files(__package__)
    library = (here / "library.py").read_text(encoding="utf-8")
    # One thread: the sandbox counts threads and the address space that each of them takes.
    first = "from __future__ import annotations\nimport os\nos.environ['OPENBLAS_NUM_THREADS'] = '1'\n"
    rest = library.replace("from __future__ import annotations\n", "")
    return first + rest + (here / "shut_in.py").read_text(encoding="utf-8")


def build(config: ReasoningGymReward, context: object) -> Reward:
    """The reward with its options. Raises `ConfigError` where this machine does not support the chosen sandbox."""
    if lacking := missing(config.sandbox):
        other = "say sandbox: landlock for the weaker mode" if config.sandbox == "namespaces" else "use a newer Linux"
        raise ConfigError(lacking, where="reasoning-gym", hint=f"allow user namespaces here, or {other}")
    return ReasoningGym(
        answer_tag=config.answer_tag, seconds_per_answer=config.seconds_per_answer, sandbox=config.sandbox
    )
