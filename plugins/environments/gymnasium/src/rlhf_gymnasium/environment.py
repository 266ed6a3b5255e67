"""`gymnasium`: one episode of an environment of that library, in text."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.components import TaskContext
from rlhf_episodes import EpisodeTruncated, Outcome, Policy, Status, Task

from .config import GymnasiumConfig
from .game import Game
from .thread import OwnThread


class GymnasiumEnvironment:
    """Made and reset with the task's seed, which all samples of a prompt share; closed when the episode ends."""

    def __init__(self, config: GymnasiumConfig, base_folder: Path) -> None:
        self._config = config
        self._base_folder = base_folder

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Turns and steps until the library says `terminated` (done) or `truncated`, or a bound ends it."""
        call = OwnThread(f"gymnasium-{task.sample_id}")
        made: list[Game] = []

        def close() -> None:
            for game in made:
                game.close()

        def begin() -> str:
            made.append(Game(self._config, self._base_folder))
            return made[0].begin(task.seed)

        try:
            return await _play(made, await call(begin), call, policy)
        finally:
            call.end(close)


async def _play(made: list[Game], text: str, call: OwnThread, policy: Policy) -> Outcome:
    rewards: dict[int, float] = {}
    num_invalid = 0
    status: Status = "truncated"
    while True:
        try:
            reply = await policy.turn(text)
        except EpisodeTruncated:
            break
        step = await call(made[0].step, reply.text)
        rewards[reply.turn] = step.reward
        num_invalid += not step.is_valid
        if step.ended is not None:
            status = step.ended
        if step.ended is not None or policy.remaining_turns < 1:
            break
        text = step.text
    return Outcome(turn_rewards=rewards, metrics={"invalid_actions": float(num_invalid)}, status=status)


def build(config: GymnasiumConfig, context: TaskContext) -> GymnasiumEnvironment:
    """An environment for one episode."""
    return GymnasiumEnvironment(config, context.base_folder)
