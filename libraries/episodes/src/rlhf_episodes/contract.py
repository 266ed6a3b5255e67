"""The contract of environments: the types they are given and give back.

Core drives `async run(task, policy) -> Outcome`. Environments that are written as `reset` and `step`, as a class whose
methods are tools, or as plain functions are brought into that form by the other modules of this room; none of them
has to import anything from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhf_core.types import FinishReason, Message, Prompt, ToolCall
from rlhf_core.util.rng import derive_seed

Status = Literal["done", "truncated", "failed"]
"""How an episode ended: by itself; by a bound on turns or tokens; by an error of its environment."""
Messages = str | Sequence[Message] | None
"""Text, chat messages, or nothing new."""
Options = Mapping[str, Any] | None
"""JSON values by the names that the engine accepts (`GenerationRequest.options`), or none."""
Tool = Mapping[str, Any]
"""A tool's description in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one episode."""

    prompt: Prompt
    """Its `text`, `messages`, `answer` and `metadata` are those of the prompt source."""
    sample_id: int
    seed: int
    """From the run's seed and the prompt's position: the samples of one prompt face the same task."""
    sample_seed: int
    """From the run's seed and the sample id: for randomness that should differ from sample to sample."""


def make_task(seed: int, purpose: str, prompt: Prompt, sample_id: int) -> Task:
    """purpose: keeps the seeds of training and of evaluation apart."""
    return Task(
        prompt=prompt,
        sample_id=sample_id,
        seed=derive_seed(seed, purpose, prompt.position),
        sample_seed=derive_seed(seed, purpose, "sample", sample_id),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the policy."""

    text: str
    """Decoded without special tokens."""
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    """As sampled, the EOS included."""
    finish_reason: FinishReason
    turn: int
    """Its number in the episode, from 0."""
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended."""

    reward: float = 0.0
    """For the episode as a whole; the reward named `environment` is this plus the sum of `turn_rewards`."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Number of a turn (`Reply.turn`) -> its reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Averaged over episodes as `environment/<name>`."""
    status: Status = "done"
    bad_tool_calls: int = 0
    """Calls with wrong arguments; core counts unreadable ones and those of unknown tools itself."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the columns that the environment declares in its class variable `columns`, or in that of its config.

    Per token `{turn: a number, or one for each of its tokens}`; else the value, which all branches have. Finite
    numbers, in lists, arrays or tensors. A column that is left out has `fill`, unless it is `optional`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent that drives itself asks the policy, by OpenAI's chat completions and completions."""

    base_url: str
    """`http://127.0.0.1:PORT/v1`."""
    api_key: str = field(repr=False)
    """The episode's own: each call with it is a turn of this episode."""
    model: str = "policy"
    """For clients that have to name one; any name will do."""


class EpisodeTruncated(Exception):
    """Raised by `Policy.turn` where no turn or no token is left. An environment may let it through."""


class Policy(Protocol):
    """The policy in one branch of one episode."""

    @property
    def remaining_turns(self) -> int: ...

    @property
    def remaining_tokens(self) -> int:
        """Response tokens that are left to this branch, observations included.

        `environment.max_tokens` is for all branches together, the model's context for each.
        """
        ...

    async def turn(
        self, messages: Messages = None, tools: Sequence[Tool] = (), stop: Sequence[str] = (), options: Options = None
    ) -> Reply:
        """Add what is new to the conversation and let the policy answer.

        messages: only those that are new; none lets the policy go on after what stands there. Those of the first
        turn belong to the prompt. tools: fixed at the first turn. stop: texts that end this turn, besides the run's.
        options: of the request, as the engine accepts them.
        Raises `EpisodeTruncated`.
        """
        ...

    def fork(self) -> Policy:
        """Another branch that begins with all that stands in this one."""
        ...

    async def endpoint(self) -> Endpoint:
        """A URL and a key for an agent that drives itself, the same at each call; they end with the episode.

        A call brings its whole conversation. It goes on in the branch of the call whose messages and reply it begins
        with; any other opens a branch.
        """
        ...


class Environment(Protocol):
    """The form that core drives. One instance plays one episode."""

    async def run(self, task: Task, policy: Policy) -> Outcome: ...
