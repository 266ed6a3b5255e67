"""The reward of a working folder: by a command in the sandbox, or by a reward of this process."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_containment.sandbox import FolderFile, ProgramResult, SandboxedCommand, SandboxError, save_folder
from rlhf_core.components import RewardContext
from rlhf_core.errors import EpisodeError
from rlhf_core.types import Rollout
from rlhf_core.util import printable
from rlhf_episodes import Task
from rlhf_episodes.selected import own_rewards

from .running import RunningCommand
from .task_folder import prompt_text

_QUOTED = 300


async def score_by_command(command: SandboxedCommand, *, is_printed: bool) -> tuple[float, dict[str, float]]:
    """Run a command in a working folder and return its score and metrics.

    Args:
        command: The command with the files of the folder, without a port.
        is_printed: Whether the score is the number in the last line of the output, rather than 1 for exit status 0.

    Returns:
        The score, which is 0 if the command exceeded a limit, and the metric `score_stopped`.

    Raises:
        EpisodeError: the command cannot be started, or did not print a number.
    """
    running = RunningCommand(command)
    try:
        result = await running.ended()
    except SandboxError as error:
        raise EpisodeError(
            f"the command of score did not run: {error}", where="environment.score", hint=hint_to_read(str(error))
        ) from error
    finally:
        await running.end()
    metrics = {"score_stopped": float(bool(result.stopped_for))}
    if result.stopped_for:  # the program may have caused it, for example by an endless loop in a tested function
        return 0.0, metrics
    return _number(result) if is_printed else float(result.exit_code == 0), metrics


def hint_to_read(problem: str) -> str:
    """Return the hint for a command that did not start."""
    if "cannot start" not in problem:
        return "play its episodes on Linux with user namespaces"
    return "check its name, and add the folders that it needs to environment.read"


def _number(result: ProgramResult) -> float:
    lines = result.output.split("\n") if result.exit_code == 0 else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        score = float(last)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        quoted = " ".join((result.error_output or result.output)[-_QUOTED:].split())
        raise EpisodeError(
            f"the command of score ended with exit code {result.exit_code} and did not print a number last: "
            f"{printable(quoted)}",
            where="environment.score",
            hint="print one number in the last line and exit with 0, or set environment.score_is_printed: false",
        )
    return score


class FolderReward:
    """A reward that sees the folder's path in the metadata of a rollout. Episodes of a process share it."""

    def __init__(self, section: Mapping[str, Any], seed: int) -> None:
        """Select the reward. It is built at the first use."""
        self._rewards = own_rewards([section], RewardContext("cpu", seed), where="environment.score")

    async def score(self, task: Task, result: ProgramResult, files: Mapping[str, FolderFile]) -> float:
        """Return the weighted score of a folder with these files.

        Args:
            task: The task of the episode.
            result: The program's result.
            files: The files of the folder, which is removed afterwards.

        Raises:
            EpisodeError: the reward failed and its `on_error` drops the sample.
        """
        with tempfile.TemporaryDirectory(prefix="rlhf-program-", ignore_cleanup_errors=True) as folder:
            await asyncio.to_thread(save_folder, files, folder)
            submit: Callable[..., Any] = self._rewards.submit
            pending = await asyncio.to_thread(submit, [_rollout(task, result, folder)])
            (scores,) = await asyncio.wrap_future(pending)
        if scores is None:
            raise EpisodeError(
                "the reward of score failed", where="environment.score", hint="see the log of the reward"
            )
        weights = self._rewards.scorer.weights
        return math.fsum(weights[name] * float(score) for name, score in scores.items())

    def close(self) -> None:
        """Release the reward."""
        self._rewards.close()


def _rollout(task: Task, result: ProgramResult, folder: str) -> Rollout:
    """Return the input of the reward: the prompt, the program's output as the completion, and the folder's path."""
    prompt = task.prompt
    return Rollout(
        sample_id=task.sample_id,
        prompt=prompt_text(prompt),
        messages=prompt.messages,
        prompt_ids=prompt.prompt_ids,
        completion=result.output,
        completion_ids=(),
        logprobs=(),
        answer=prompt.answer,
        metadata={**prompt.metadata, "folder": folder},
        policy_version=0,
        finish_reason="stop",
        group_id=prompt.position,
    )
