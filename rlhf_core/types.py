"""The data that flows through a run.

Legend used in every docstring of this project: **B** sequences in a batch, **P** prompt tokens, **A** response (action)
tokens, **S** = P + A, **K** tokens kept by truncated sampling, **V** vocabulary. Prompts are padded on the left and
responses on the right. A mask is named for what True means.

Nothing here imports torch when it runs, so that a reward, the command line and the configuration stay light;
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
"""A model's part in an algorithm: `policy`, `critic`, `reference`, or that of a frozen model which it declares."""
FinishReason = Literal["stop", "length"]
"""Why an answer ended: by itself, or at the length limit."""
Message = Mapping[str, Any]
"""One chat message: `role`, `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the stream, ready for an engine."""

    position: int
    """Position in the run's endless prompt stream; determines the ids of its samples."""
    text: str
    """The text the model continues: the prompt itself, or the rendered chat template."""
    prompt_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)  # per prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call written by the policy."""

    name: str
    """Empty where the call could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the call could not be read; None where it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of a response: sampled by the policy in one go, or given by the environment."""

    role: Literal["policy", "environment"]
    text: str
    """Sampled tokens decoded without special ones; an observation's text unchanged."""
    token_ids: tuple[int, ...]
    """All tokens of the turn in the row, the chat template's markup included."""
    logprobs: tuple[float, ...] = ()
    """Nats, as long as `token_ids`; all 0 in an environment's turn."""
    reward: float = 0.0
    """The environment's reward for a turn of the policy, raw."""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """The turn as JSON values, for files and messages."""
        calls = [{"name": c.name, "arguments": dict(c.arguments), "error": c.error} for c in self.tool_calls]
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "token_ids": list(self.token_ids), "logprobs": list(self.logprobs), "tool_calls": calls}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Turn:
        """Inverse of `to_mapping`. Raises `TypeError` or `KeyError` for anything else."""
        sequences = {name: tuple(values[name]) for name in ("token_ids", "logprobs")}
        calls = tuple(ToolCall(**call) for call in values["tool_calls"])
        return cls(**{**values, **sequences, "tool_calls": calls})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled answer, or one branch of an episode, as a reward sees it: plain Python values, no tensor."""

    sample_id: int
    """prompt position x samples_per_prompt + k: unique in the run; kept when a prompt is made again."""
    prompt: str
    messages: tuple[Message, ...] | None
    prompt_ids: tuple[int, ...]
    completion: str
    """Text written by the policy, decoded without special tokens; turns are joined by a newline."""
    completion_ids: tuple[int, ...]
    """The whole response: sampled tokens, the EOS of each turn included, and the observations between them."""
    logprobs: tuple[float, ...]
    """Nats, under the distribution that each token was sampled from, 0 for given ones; as long as `completion_ids`."""
    answer: Any
    metadata: Mapping[str, Any]
    policy_version: int
    finish_reason: FinishReason
    """`stop`: the model ended its answer; `length`: the (last) turn was cut by the token limit, or the episode was
    truncated."""
    action_mask: tuple[bool, ...] | None = None
    """True where the policy chose the token and it counts; None when it chose all. False on observations, and on what
    another branch of the episode counts already."""
    group_id: int = 0
    """Position of the prompt in the stream; the samples of one prompt share it."""
    branch: int = 0
    """Index of this row in its episode; rows of an episode share `sample_id`."""
    turns: tuple[Turn, ...] = ()
    """The response turn by turn; a single answer is one turn of the policy."""
    policy_versions: tuple[int, ...] = ()
    """One for each of `completion_ids`, -1 for given ones; empty where all are `policy_version`, the oldest."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens of `completion_ids` that the policy chose and that count."""
        ids = self.completion_ids
        return ids if self.action_mask is None else tuple(compress(ids, self.action_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferItem:
    """One sample, unpadded, as it is buffered, sent and checkpointed."""

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
    """[A] float32 nats, of the sampling policy (the "old" log-probs)."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Raw scores by reward name, neither weighted nor clipped."""
    reference_log_probs: Tensor | None = None
    """[A] float32 nats, of the reference, on the same sampling distribution."""
    values: Tensor | None = None
    """[A] float32, the critic's value of the state before each action."""
    trainer_log_probs: Tensor | None = None
    """[A] float32 nats, of the trainer's policy at the start of the episode; where the algorithm needs it."""
    support_ids: Tensor | None = None
    """[A, K] int32, the tokens truncated sampling (top-k, top-p) chose from, -1 = padding."""
    truncated: bool = False
    """True when the answer was cut by the token limit and so has no EOS."""
    kl_coef: float | None = None
    """KL coefficient set by the maker; None leaves it to the trainer."""
    score: float | None = None
    """Combined reward of the sample, set by the trainer."""
    advantages: Tensor | None = None
    """[A] float32, set by the algorithm."""
    returns: Tensor | None = None
    """[A] float32, set by the algorithm where it has a critic."""
    branch: int = 0
    """Index of this row in its episode; (sample_id, branch) is unique in the run."""
    policy_versions: Tensor | None = None
    """[A] int32, as those of `Rollout`; None where all are `policy_version`. Batches leave them out."""
    columns: Columns = field(default_factory=Columns)
    """Values of the columns that plugins, and core's own optional parts, have declared."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together."""
        return int(self.prompt_ids.numel()) + int(self.response_ids.numel())

    @property
    def num_response_tokens(self) -> int:
        """A, observations included."""
        return int(self.response_ids.numel())

    @property
    def num_sampled_tokens(self) -> int:
        """Response tokens that the policy chose and that count."""
        return int(self.action_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A batch of samples, padded to the longest prompt and the longest response in it.

    Frozen: use `dataclasses.replace` to change one.
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
    """[B, A, K] int32, -1 = padding; a position all -1 was sampled from the whole vocabulary."""
    kl_coef: Tensor | None = None
    """[B] float32."""
    scores: Tensor | None = None
    """[B] float32."""
    advantages: Tensor | None = None
    """[B, A] float32."""
    returns: Tensor | None = None
    """[B, A] float32."""
    branches: Tensor | None = None
    """[B] int64; None where every episode is one row."""
    columns: Columns = field(default_factory=Columns)
    """As those of the samples: [B, A, ...] per token, [B, ...] per sample and prompt, B mappings of metrics."""
    view: EpisodeView | None = None
    """The episode these rows are part of, while an algorithm computes advantages; None where they are all of it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values of the episode, to log on each of its lines (`kl/mean`, …); set by an algorithm with the advantages."""

    def __len__(self) -> int:
        return int(self.sequences.shape[0])

    @property
    def row_sample_ids(self) -> Tensor | None:
        """[B] int64 `sample_ids`; None where every row is a separate sample."""
        return None if self.branches is None else self.sample_ids

    @property
    def num_actions(self) -> int:
        """A: response positions in this batch, padding included."""
        return int(self.action_mask.shape[1])

    @property
    def prompt_length(self) -> int:
        """P: prompt positions in this batch, padding included."""
        return int(self.sequences.shape[1]) - self.num_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All samples of one prompt: the unit that makers make, send and account for."""

    position: int
    """Position of the prompt in the stream."""
    rollouts: tuple[Rollout, ...]
    """In order of `sample_id` and `branch`."""
    items: tuple[BufferItem, ...]
    """One item per rollout, in the same order."""

    @property
    def is_empty(self) -> bool:
        """Whether the rewards' failure policy dropped all its samples."""
        return not self.items


@dataclass(slots=True)
class PhaseTimes:
    """Seconds spent on making experience, and the amounts made."""

    rollout_s: float = 0.0
    environment_s: float = 0.0  # the engine waited for environments
    reward_s: float = 0.0  # wait after generation only: rewards are scored while later answers are generated
    forward_s: float = 0.0  # reference log-probs and values
    response_tokens: int = 0
    prompt_tokens: int = 0  # of every turn
    reused_tokens: int = 0  # of those, `Completion.num_reused`
    reward_calls: dict[str, float] = field(default_factory=dict)
    """`reward_calls/<name>/<count>`: what each reward cost, as `RewardScorer.take_metrics` tells it."""

    def add(self, other: PhaseTimes) -> None:
        for each in fields(self)[:-1]:
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for key, value in other.reward_calls.items():
            self.reward_calls[key] = self.reward_calls.get(key, 0.0) + value

    def take(self) -> PhaseTimes:
        """Return a copy, and start again from zero."""
        taken = replace(self)
        PhaseTimes.__init__(self)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSummary:
    """The part of a sample that every trainer rank has: fields of its `BufferItem`, but neither tokens nor text."""

    sample_id: int
    group_id: int
    policy_version: int
    num_tokens: int
    num_sampled_tokens: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    branch: int = 0
    columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # those of metrics
    mixed: bool = False  # its tokens are of several policy versions

    @classmethod
    def of(cls, item: BufferItem) -> ItemSummary:
        """The summary of an item."""
        same: dict[str, Any] = {each.name: getattr(item, each.name) for each in fields(cls)[:-2]}
        columns = dict(item.columns.only(lambda name, kind: kind.per == "metrics"))
        return cls(**same, columns=columns, mixed=item.policy_versions is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedEpisode:
    """An episode whose samples are made: a summary of each, and the way to the rest."""

    rows: Sequence[ItemSummary]
    """In order of `sample_id` and `branch`; the same on every trainer rank."""
    data: EpisodeData
    times: PhaseTimes
    """Phase times of this rank's makers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The channel's metrics of the episode (waits, bytes sent), put on its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of an engine. Log-probs are of exactly this distribution."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """> 0; use `greedy` for argmax."""
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    """1 = off."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer besides EOS; kept in the completion."""
    greedy: bool = False
    """Argmax decoding; log-probs are then of the untruncated distribution at temperature 1."""
    max_length: int | None = None
    """Bound on prompt and response together (the seed classes' `max_length`)."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of every request (`engine.options`); a request's own take precedence. Engines read the request's only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """An answer, or a turn of an episode. Its token t has the noise of (run seed, sample_id, branch, offset + t)."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    branch: int = 0
    offset: int = 0
    """Tokens sampled in this branch before."""
    max_new_tokens: int | None = None
    """Limit of this request, where lower than that of the sampling parameters."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """What the model's forward takes besides ids: the prompt's columns marked `model_input`."""
    goes_on: bool = False  # another turn, whose prompt begins with this one and its answer, may follow
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON values by the names that the engine accepts (`EngineConfig.request_options`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer to one `GenerationRequest`."""

    sample_id: int
    token_ids: tuple[int, ...]
    """At least one token, up to and including the first EOS."""
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled it: its oldest token."""
    policy_versions: tuple[int, ...] = ()
    """One for each token, where weights changed on the way (`InFlightEngine`); empty where all are `policy_version`."""
    support_ids: Sequence[Sequence[int]] | None = None
    """Per token, the ids that truncated sampling chose from; None when nothing was truncated."""
    branch: int = 0  # of the request
    num_reused: int = 0  # prompt tokens that were not computed for it: another request's, or an earlier turn's
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of the columns that the engine declares, [len(token_ids), ...] per token, and of core's `temperature`."""
