"""The contract between environments and core: the protocols `Environment` and `Policy` and the types they exchange.

Core drives `async run(task, policy) -> Outcome`. `shapes.py` adapts other forms of environments (`reset` and `step`, a
class whose methods are tools, plain functions) to it. Environments do not have to import anything from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhf_core.types import FinishReason, Message, Prompt, ToolCall
from rlhf_core.util.rng import derive_seed

Status = Literal["done", "truncated", "failed"]
"""How an episode ended: by itself, at a limit on turns or tokens, or by an error of its environment."""
Messages = str | Sequence[Message] | None
"""Plain text, chat messages, or None for nothing new."""
Options = Mapping[str, Any] | None
"""JSON values by the option names that the engine accepts (`GenerationRequest.options`), or None for no options."""
Tool = Mapping[str, Any]
"""A tool's description in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one episode."""

    prompt: Prompt
    """The prompt with its `text`, `messages`, `answer` and `metadata` as in the prompt source."""
    sample_id: int
    """Id of the sample that the episode produces."""
    seed: int
    """Derived from the run's seed and the prompt's position. All samples of a prompt get the same task."""
    sample_seed: int
    """Derived from the run's seed and the sample id, for randomness that should differ between samples."""


def make_task(seed: int, purpose: str, prompt: Prompt, sample_id: int) -> Task:
    """Return the task of a sample. Different purposes (training, evaluation) get different seeds."""
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
    """Decoded text without special tokens."""
    tool_calls: tuple[ToolCall, ...]
    """Calls in the reply, in order. Unreadable calls have an `error`."""
    token_ids: tuple[int, ...]
    """Sampled tokens, including the EOS."""
    finish_reason: FinishReason
    turn: int
    """Number of the turn in the episode, from 0."""
    policy_version: int
    """Version of the weights that sampled the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended.

    Example:
        >>> outcome = Outcome(reward=0.5, turn_rewards={0: 1.0}, metrics={"moves": 3.0})
        >>> outcome.status
        'done'
    """

    reward: float = 0.0
    """Reward of the whole episode. The reward named `environment` is this plus the sum of `turn_rewards`."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Reward of each turn, by its number (`Reply.turn`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics, averaged over episodes and logged as `environment/<name>`."""
    status: Status = "done"
    bad_tool_calls: int = 0
    """Number of calls with invalid arguments. Core counts unreadable calls and calls of unknown tools itself."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the columns declared in the class variable `columns` of the environment or of its config.

    A per-token column maps turns to values: `{turn: a number, or a list with one per token}`. Any other column has one
    value for all branches. Numbers must be finite and may be in lists, arrays or tensors. A missing column is filled
    with its `fill`, unless it is `optional`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An API for agents that call the policy over HTTP.

    It speaks OpenAI's chat completions, completions and Responses, and Anthropic's Messages.
    """

    base_url: str
    """`http://127.0.0.1:PORT/v1`, for OpenAI's clients."""
    api_key: str = field(repr=False)
    """Key of the episode. Each call with it is a turn of this episode."""
    model: str = "policy"
    """Model name for clients that require one. Any name works."""

    @property
    def anthropic_base_url(self) -> str:
        """`http://127.0.0.1:PORT`, for Anthropic's clients, which append `/v1/messages`."""
        return self.base_url.removesuffix("/v1")


class EpisodeTruncated(Exception):
    """Raised by `Policy.turn` if no turn or token is left. An environment does not have to catch it."""


class Policy(Protocol):
    """The policy in one branch of one episode.

    Core creates it. The environment calls it in the process that plays the episode: on each rank with a rollout
    engine, or in that rank's child process if the environment is isolated.

    Example:
        A loop in `Environment.run` that stops at the limits::

            observation = game.start(task.seed)
            while not game.is_over and policy.remaining_turns:
                reply = await policy.turn(observation)  # raises EpisodeTruncated if no token is left
                observation = game.step(reply.text)
            return Outcome(reward=game.score)
    """

    @property
    def remaining_turns(self) -> int:
        """Turns left to the episode, over all branches (`environment.max_turns`)."""

    @property
    def remaining_tokens(self) -> int:
        """Response tokens left to this branch, observations included.

        `environment.max_tokens` limits all branches together. The model's context limits each branch.
        """

    @property
    def sees_images(self) -> bool:
        """Whether messages may contain images."""

    async def turn(
        self, messages: Messages = None, tools: Sequence[Tool] = (), stop: Sequence[str] = (), options: Options = None
    ) -> Reply:
        """Append new messages to the conversation and sample the policy's reply.

        Args:
            messages: Only the messages since the last turn. None continues the last reply. On the first turn they
                become part of the prompt. Contents may be lists of text and image parts.
            tools: Tools that the policy may call. Fixed at the first turn.
            stop: Texts that end this turn, in addition to those of the run.
            options: Options of the generation request, by the names that the engine accepts.

        Raises:
            EpisodeTruncated: No turn or token is left.
        """

    def fork(self) -> Policy:
        """Return a new branch that starts with the whole conversation of this one. Requires at least one turn."""

    async def endpoint(self) -> Endpoint:
        """Return the URL and key of the episode's API, for an agent that makes its own calls.

        Each call returns the same endpoint. It closes with the episode. A client sends its whole conversation with
        each request. A request that starts with the messages and the reply of an earlier one continues its branch. Any
        other request opens a new branch.
        """


class Environment(Protocol):
    """An environment in the form that core drives. Each instance plays one episode.

    Every rank with a rollout engine plays its own episodes, on an event loop in a thread (or in a child process if the
    environment is isolated).

    Example:
        Core plays each sample of a rollout like this::

            environment = build(config, context)
            outcome = await environment.run(task, policy)  # calls policy.turn for each turn
            reward = outcome.reward + sum(outcome.turn_rewards.values())
    """

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode and return how it ended.

        Args:
            task: Prompt and seeds of the episode.
            policy: The policy in the episode's first branch.
        """
