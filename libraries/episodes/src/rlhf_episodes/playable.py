"""An environment of a player, and the marks of its episodes if the run has several environments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_core.rollout.episode_metrics import ENVIRONMENT, OWN
from rlhf_core.rollout.row import Played
from rlhf_core.types import Prompt

from .attempt import MakeEnvironment
from .isolation.host import IsolatedEnvironments
from .part_rewards import PartRewards, measure
from .rules import Rules
from .section import EnvironmentConfig
from .shared import EnvironmentMaker

_COUNTS = ("num_turns", "bad_tool_calls", "response_tokens", "observation_tokens")
_FRACTIONS = ("truncated", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Playable:
    """An environment with its own options."""

    make: MakeEnvironment | IsolatedEnvironments
    """Creates environments in this process, or in child processes."""
    rules: Rules
    name: str
    """Name in errors."""
    label: str | None = None
    """Name in metrics. None if it is the only environment of the run."""
    weight: float = 1.0
    """Factor of its rewards."""
    maker: EnvironmentMaker | None = None
    """Holds resources that episodes in this process share. None without any."""
    rewards: PartRewards | None = None
    """Rewards that are part of its reward. Only with a label."""

    @property
    def options(self) -> EnvironmentConfig:
        """Its options."""
        return self.rules.options

    @property
    def isolated(self) -> IsolatedEnvironments | None:
        """Its child processes. None if it runs in this process."""
        return self.make if isinstance(self.make, IsolatedEnvironments) else None


def mark(played: Played, environment: Playable, labels: tuple[str, ...]) -> Played:
    """Return an episode with its reward weighted, and with metrics and metadata that name its environment.

    Args:
        played: The episode.
        environment: The environment that it was played in. Without a label, the episode is returned unchanged.
        labels: Labels of all environments of the run.
    """
    label = environment.label
    if label is None or not played.rows:
        return played
    weight = environment.weight
    turn_rewards = {turn: weight * reward for turn, reward in played.turn_rewards.items()}
    reward = None if played.reward is None else weight * played.reward
    measured = dict(played.rows[0].columns[ENVIRONMENT])
    own = {name.removeprefix(OWN): value for name, value in measured.items() if name.startswith(OWN)}
    common = {name: value for name, value in measured.items() if not name.startswith(OWN)}
    ours = {f"{name}_mean": measured[name] for name in _COUNTS}
    ours |= {f"{name}_fraction": measured[name] for name in _FRACTIONS}
    if reward is not None:
        ours |= {"reward": reward, f"reward/{ENVIRONMENT}": played.reward or 0.0}
    own = {f"{OWN}{name}" if name in {*ours, "share"} else name: value for name, value in own.items()}
    common |= {f"{OWN}{label}/{name}": value for name, value in (own | ours).items()}
    common |= {f"{OWN}{each}/share": float(each == label) for each in labels}
    measure(played, common)
    metadata = {"environment": label, **played.prompt.metadata}
    prompt: Prompt = replace(played.prompt, metadata=metadata)
    return replace(played, prompt=prompt, reward=reward, turn_rewards=turn_rewards)
