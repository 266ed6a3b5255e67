"""Data types that flow through a run.

Dimensions in every docstring of this project: **B** sequences in a batch, **P** prompt tokens, **A** response (action)
tokens, **S** = P + A, **K** tokens kept by truncated sampling, **V** vocabulary. Prompts are padded on the left and
responses on the right. A mask is named after the meaning of True.

This module does not import torch at run time, so that rewards, the command line and the configuration load fast.
`rlhf_core.batching` converts between these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

from .columns import Columns

if TYPE_CHECKING:
    from torch import Tensor

    from .episode_view import EpisodeView
    from .protocols import EpisodeData

Role = str
"""A model's role in an algorithm: `policy`, `critic`, `reference`, or the name of a frozen model that it declares."""
FinishReason = Literal["stop", "length"]
"""Why an answer ended: at an EOS token or stop text, or at the length limit."""
Message = Mapping[str, Any]
"""One chat message: `role`, `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the stream, ready for an engine."""

    position: int
    """Position in the run's endless prompt stream. Determines the ids of its samples."""
    text: str
    """Text that the model continues: the prompt itself, or the rendered chat template."""
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)  # per prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call written by the policy."""

    name: str
    """Empty if the call could not be parsed."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the call could not be parsed. None if it was parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a response: sampled by the policy, or an observation from the environment."""

    role: Literal["policy", "environment"]
    text: str
    """The sampled tokens decoded without special tokens, or the observation's text unchanged."""
    token_ids: tuple[int, ...]
    """All tokens of the turn in the row, including the chat template's markup."""
    logprobs: tuple[float, ...] = ()
    """One per token of `token_ids`, in nats. All 0 in an environment's turn."""
    reward: float = 0.0
    """The environment's raw reward for a turn of the policy."""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Return the turn as JSON values, for files and messages."""
        calls = [{"name": c.name, "arguments": dict(c.arguments), "error": c.error} for c in self.tool_calls]
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "token_ids": list(self.token_ids), "logprobs": list(self.logprobs), "tool_calls": calls}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Turn:
        """Build a turn from the result of `to_mapping`. Raises `TypeError` or `KeyError` for a wrong or missing key."""
        sequences = {name: tuple(values[name]) for name in ("token_ids", "logprobs")}
        calls = tuple(ToolCall(**call) for call in values["tool_calls"])
        return cls(**{**values, **sequences, "tool_calls": calls})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled answer, or one branch of an episode, in plain Python values without tensors. Rewards score these."""

    sample_id: int
    """prompt position x samples_per_prompt + k. Unique in the run, and the same if the prompt is sampled again."""
    prompt: str
    messages: tuple[Message, ...] | None
    prompt_ids: tuple[int, ...]
    completion: str
    """Text sampled from the policy, decoded without special tokens. Turns are joined by a newline."""
    completion_ids: tuple[int, ...]
    """The whole response: sampled tokens, including the EOS of each turn, and the observations between them."""
    logprobs: tuple[float, ...]
    """One per token of `completion_ids`, in nats, under the distribution that was sampled from. 0 for observations."""
    answer: Any
    metadata: Mapping[str, Any]
    policy_version: int
    finish_reason: FinishReason
    """`stop`: the model ended its answer. `length`: the (last) turn was cut by the token limit, or the episode was
    truncated."""
    action_mask: tuple[bool, ...] | None = None
    """True for tokens that the policy sampled and that count in the loss. False for observations, and for tokens that
    another branch of the episode counts already. None if all tokens count."""
    group_id: int = 0
    """Position of the prompt in the stream, shared by the samples of one prompt."""
    branch: int = 0
    """Index of this row in its episode. Rows of an episode share `sample_id`."""
    turns: tuple[Turn, ...] = ()
    """The response turn by turn. A single answer is one turn of the policy."""
    policy_versions: tuple[int, ...] = ()
    """One per token of `completion_ids`, -1 for observations. Empty if all are `policy_version`, the oldest."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Tokens of `completion_ids` that the policy sampled and that count in the loss."""
        ids = self.completion_ids
        return ids if self.action_mask is None else tuple(compress(ids, self.action_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferItem:
    """One unpadded sample, the form in which samples are buffered, sent and checkpointed."""

    sample_id: int
    group_id: int
    policy_version: int
    prompt_ids: Tensor
    """[P] int64."""
    response_ids: Tensor
    """[A] int64."""
    action_mask: Tensor
    """[A] bool, True = counts in the loss."""
    action_log_probs: Tensor
    """[A] float32 nats, under the sampling policy (the "old" log-probs)."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Raw scores by reward name, neither weighted nor clipped."""
    reference_log_probs: Tensor | None = None
    """[A] float32 nats, under the reference model with the same sampling parameters."""
    values: Tensor | None = None
    """[A] float32, the critic's value of the state before each action."""
    trainer_log_probs: Tensor | None = None
    """[A] float32 nats, under the trainer's policy at the start of the episode. Set if the algorithm needs them."""
    support_ids: Tensor | None = None
    """[A, K] int32, the tokens that truncated sampling (top-k, top-p) chose from, -1 = padding."""
    truncated: bool = False
    """True if the answer was cut by the token limit and therefore lacks an EOS."""
    kl_coef: float | None = None
    """KL coefficient set by the maker. None if the trainer sets it."""
    score: float | None = None
    """Combined reward of the sample, set by the trainer."""
    advantages: Tensor | None = None
    """[A] float32, set by the algorithm."""
    returns: Tensor | None = None
    """[A] float32, set by the algorithm if it has a critic."""
    branch: int = 0
    """Index of this row in its episode. (sample_id, branch) is unique in the run."""
    policy_versions: Tensor | None = None
    """[A] int32, with the same meaning as in `Rollout`. None if all are `policy_version`. Batches omit them."""
    columns: Columns = field(default_factory=Columns)
    """Values of the columns declared by plugins and by core's optional parts."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens (P + A)."""
        return int(self.prompt_ids.numel()) + int(self.response_ids.numel())

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens (A), including observations."""
        return int(self.response_ids.numel())

    @property
    def num_sampled_tokens(self) -> int:
        """Number of response tokens that the policy sampled and that count in the loss."""
        return int(self.action_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A batch of samples, padded to the longest prompt and the longest response in it.

    Immutable. Use `dataclasses.replace` for a changed copy.
    """

    sequences: Tensor
    """[B, S] int64, prompts padded left, responses padded right."""
    attention_mask: Tensor
    """[B, S] bool, True = a real token (known from lengths, never from `token != pad`)."""
    action_mask: Tensor
    """[B, A] bool, True = counts in the loss."""
    action_log_probs: Tensor
    """[B, A] float32 nats."""
    sample_ids: Tensor
    """[B] int64."""
    group_ids: Tensor
    """[B] int64."""
    policy_versions: Tensor
    """[B] int64, of each sample's oldest token."""
    truncated: Tensor
    """[B] bool."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32, raw."""
    reference_log_probs: Tensor | None = None
    """[B, A] float32."""
    values: Tensor | None = None
    """[B, A] float32."""
    trainer_log_probs: Tensor | None = None
    """[B, A] float32."""
    support_ids: Tensor | None = None
    """[B, A, K] int32, -1 = padding. A position with only -1 was sampled from the whole vocabulary."""
    kl_coef: Tensor | None = None
    """[B] float32."""
    scores: Tensor | None = None
    """[B] float32."""
    advantages: Tensor | None = None
    """[B, A] float32."""
    returns: Tensor | None = None
    """[B, A] float32."""
    branches: Tensor | None = None
    """[B] int64. None if every episode is one row."""
    columns: Columns = field(default_factory=Columns)
    """The samples' columns: [B, A, ...] per token, [B, ...] per sample and prompt, B mappings of metrics."""
    view: EpisodeView | None = None
    """The episode that these rows belong to, while an algorithm computes advantages. None if they are all of it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode, logged on each of its lines (`kl/mean`, …). Set by an algorithm with the advantages."""

    def __len__(self) -> int:
        return int(self.sequences.shape[0])

    @property
    def row_sample_ids(self) -> Tensor | None:
        """[B] int64 `sample_ids`, or None if every row is a separate sample."""
        return None if self.branches is None else self.sample_ids

    @property
    def num_actions(self) -> int:
        """Number of response positions in this batch (A), including padding."""
        return int(self.action_mask.shape[1])

    @property
    def prompt_length(self) -> int:
        """Number of prompt positions in this batch (P), including padding."""
        return int(self.sequences.shape[1]) - self.num_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All samples of one prompt: the unit that makers produce, send and account for."""

    position: int
    """Position of the prompt in the stream."""
    rollouts: tuple[Rollout, ...]
    """Sorted by `sample_id` and `branch`."""
    items: tuple[BufferItem, ...]
    """One item per rollout, in the same order."""

    @property
    def is_empty(self) -> bool:
        """Whether the rewards' failure policy dropped all samples of the group."""
        return not self.items


@dataclass(slots=True)
class PhaseTimes:
    """Seconds spent in each phase of making experience, and token counts."""

    rollout_s: float = 0.0
    environment_s: float = 0.0  # time in which the engine waited for environments
    reward_s: float = 0.0  # only the wait after generation: rewards score while later answers are generated
    forward_s: float = 0.0  # reference log-probs and values
    response_tokens: int = 0
    prompt_tokens: int = 0  # over all turns
    reused_tokens: int = 0  # prompt tokens that were not computed again (`Completion.num_reused`)
    reward_calls: dict[str, float] = field(default_factory=dict)
    """`reward_calls/<name>/<count>`: the cost of each reward, from `RewardScorer.take_metrics`, and of those that a
    player calls."""

    def add(self, other: PhaseTimes) -> None:
        """Add the times and counts of `other` in place."""
        for each in fields(self)[:-1]:
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for key, value in other.reward_calls.items():
            self.reward_calls[key] = self.reward_calls.get(key, 0.0) + value

    def take(self) -> PhaseTimes:
        """Return a copy and reset this object to zero."""
        taken = replace(self)
        PhaseTimes.__init__(self)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSummary:
    """The fields of a `BufferItem` that every trainer rank has, without tokens and text."""

    sample_id: int
    group_id: int
    policy_version: int
    num_tokens: int
    num_sampled_tokens: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    branch: int = 0
    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # only columns of metrics
    mixed: bool = False  # whether its tokens were sampled by several policy versions

    @classmethod
    def of(cls, item: BufferItem) -> ItemSummary:
        """Return the summary of an item."""
        same: dict[str, Any] = {each.name: getattr(item, each.name) for each in fields(cls)[:-2]}
        columns = dict(item.columns.only(lambda name, kind: kind.per == "metrics"))
        return cls(**same, columns=columns, mixed=item.policy_versions is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEpisode:
    """An episode whose samples are complete: a summary of each, and access to their tokens and texts."""

    rows: Sequence[ItemSummary]
    """In order of `sample_id` and `branch`, the same on every trainer rank."""
    data: EpisodeData
    """Loads the items and rollouts of chosen rows."""
    times: PhaseTimes
    """Phase times of this rank's makers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The channel's metrics of the episode (waits, bytes sent), logged on its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of an engine. Its log-probs are under exactly this distribution."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """> 0. Use `greedy` for argmax."""
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    """1 = off."""
    stop: tuple[str, ...] = ()
    """Texts other than EOS that end an answer. They are kept in the completion."""
    greedy: bool = False
    """Argmax decoding. Log-probs are then under the untruncated distribution at temperature 1."""
    max_length: int | None = None
    """Maximum number of prompt and response tokens together (the seed classes' `max_length`)."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Default options of all requests (`engine.options`), overridden by a request's own. Engines read only those of
    the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one answer, or one turn of an episode.

    The sampling noise of its token t is a function of (run seed, sample_id, branch, offset + t).
    """

    sample_id: int
    prompt_ids: tuple[int, ...]
    branch: int = 0
    offset: int = 0
    """Number of tokens sampled earlier in this branch."""
    max_new_tokens: int | None = None
    """Limit of this request, if lower than the limit in the sampling parameters."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Inputs of the model's forward in addition to ids: the prompt's columns marked `model_input`."""
    goes_on: bool = False  # whether a further turn may follow, whose prompt begins with this prompt and its answer
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Option name -> JSON value, for the options that the engine accepts (`EngineConfig.request_options`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer to one `GenerationRequest`."""

    sample_id: int
    token_ids: tuple[int, ...]
    """At least one token, up to and including the first EOS."""
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled the answer, or its oldest token if they changed."""
    policy_versions: tuple[int, ...] = ()
    """One per token if the weights changed during the answer (`InFlightEngine`). Empty if all are `policy_version`."""
    support_ids: Sequence[Sequence[int]] | None = None
    """Per token, the ids that truncated sampling chose from. None if sampling was not truncated."""
    branch: int = 0  # branch of the request
    num_reused: int = 0  # prompt tokens reused from another request or an earlier turn instead of computed again
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of core's `temperature` and the columns that the engine declares, [len(token_ids), ...] per token."""
