"""The abstract `Algorithm`, which defines the update, and its two kinds.

An algorithm holds the mathematics of its loss and nothing of loops, devices, processes or files. The trainer
divides every summed loss term by its count over the whole update (all micro-batches of all ranks), so the
gradient does not depend on how the update was split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from .columns import Column
from .errors import UserInputError
from .types import BufferItem, Experience, Role, RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from .place import Place


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric averaged over micro-batches and ranks by its weight."""

    total: Tensor | float
    """Sum over what was counted."""
    count: Tensor | float
    """How many there were; summed over processes before the division."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The contribution of one micro-batch to an update."""

    sums: Mapping[str, Tensor]
    """Loss term -> its sum over this micro-batch (scalar, with gradient), not yet divided by its count."""
    metrics: Mapping[str, Mean] = field(default_factory=dict)
    """`loss/<term>` is added by the trainer."""
    log_probs: Tensor | None = None
    """[B, A] float32, detached: this forward's log-probs, from which the trainer takes the gap to the engine."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A named part of the objective: which model learns from it, and with what weight."""

    role: Role
    """The model that learns from it."""
    coefficient: float = 1.0
    """Its factor in the sum of that model's terms."""


class Item(Protocol):
    """One training sample of an algorithm: any object that knows its length."""

    @property
    def num_tokens(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Item)
BatchT = TypeVar("BatchT", bound=Sized)


class Algorithm(ABC, Generic[ItemT, BatchT]):
    """Which models are trained, and by what loss."""

    columns: Mapping[str, Column] = {}
    """The columns that it adds to samples."""

    @property
    @abstractmethod
    def roles(self) -> frozenset[Role]:
        """The models this algorithm needs under its options; none other is built."""

    @property
    @abstractmethod
    def terms(self) -> Mapping[str, LossTerm]:
        """The loss terms that `loss` returns sums of; constant for a run."""

    @abstractmethod
    def collate(self, items: Sequence[ItemT]) -> BatchT:
        """Items to a batch, padded to the longest in it, on the CPU: a dataclass, whose tensors the trainer moves."""

    @abstractmethod
    def masked(self, item: ItemT) -> ItemT:
        """The same item with no effect on the loss; a rank with fewer micro-batches runs it to stay in step."""

    @property
    def model_kind(self) -> str:
        """Kind of model that is loaded from `model.path`, trained, and saved.

        causal-lm, sequence-classification (one label: a score), or the `model_kind` of a plugin's `ModelKind`.
        """
        return "causal-lm"

    def build_critic(self, policy: nn.Module) -> nn.Module:
        """The value model for a freshly loaded policy; called only when `critic` is among the roles."""
        raise TypeError(f"{type(self).__name__} names the role critic but builds none")

    def units(self, items: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """The items grouped into units, which share a rank and a forward pass; by default each item is its own unit.

        The grouping of two items must not depend on the others: `items` may be an episode, a global batch, or what a
        rank has of one. They are in order; those of other ranks are summaries (`ItemSummary` of a sampled answer). A
        global batch has whole units, and may be smaller for it. A masked filler is a unit by itself.
        """
        return [[item] for item in items]

    @abstractmethod
    def counts(self, batch: BatchT) -> Mapping[str, float]:
        """Per loss term, this batch's part of the divisor (tokens, sequences). Runs no model."""

    @abstractmethod
    def loss(self, models: Mapping[str, nn.Module], batch: BatchT) -> LossOutput:
        """Forward one micro-batch. `models` has a module for each trained role."""

    def set_option(self, name: str, value: float) -> None:
        """Change an option of a running run (`rlhf control`); called on every rank, between updates.

        `rlhf control` requests `kl_coef` alone, a hook's `Action` any. Raises `UserInputError` if it cannot be
        changed.
        """
        raise UserInputError(f"this algorithm's {name} cannot be changed while a run goes on", where="algorithm")

    def end_episode(self) -> None:
        """Called after training on an episode, to adapt state such as a KL controller."""

    def state_dict(self) -> dict[str, Any]:
        """State to keep across a resume besides weights (of a KL controller, say), as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that is only run forward, by a `GroupPass`: a causal LM with the policy's tokens."""

    path: str
    """As `model.path`; errors name it as the option `algorithm.ROLE.path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    offload: bool = False
    """Keep it in host memory between its passes; not done if a strategy shards it."""


class PassContext(Protocol):
    """The models of the process in which samples are made, for the passes of an algorithm."""

    place: Place
    """Device, precision and processes."""
    models: Mapping[Role, nn.Module]
    """By role: policy and critic, as they are trained or as copies that get their weights, and the frozen ones."""
    temperature: float
    """At which answers are sampled."""

    def forward(
        self, role: Role, groups: Sequence[RolloutGroup], run: Callable[[nn.Module, Experience], Tensor]
    ) -> list[Tensor]:
        """`run(model, batch)`, [B, A, ...], for all items of the groups, in batches of bounded tokens.

        Returns [A, ...] float32 on the CPU for each item in order, without padding; no gradients. The model is brought
        to the device. Collective: every rank calls it with its own groups, and makes the same number of forward calls.
        """
        ...


class GroupPass(ABC):
    """Adds values to finished samples, in the process that made them, for many groups at once."""

    columns: Mapping[str, Column] = {}
    """The columns it fills."""

    @abstractmethod
    def run(self, groups: Sequence[RolloutGroup]) -> Sequence[Mapping[str, Any]]:
        """A mapping for each item of the groups, in order: column -> its value for this sample.

        `reference_log_probs` and `values` ([A] float32) need no column. Every rank is called, with its own groups.
        """

    def published(self, version: int) -> None:
        """Called once the trained models here have the weights of a new version."""


class RolloutAlgorithm(Algorithm[BufferItem, Experience]):
    """An algorithm that learns from sampled answers."""

    @abstractmethod
    def advantages(self, episode: Experience) -> Experience:
        """The rows with `advantages` (and `returns`) from `scores`, log-probs and values, and with `metrics`.

        Arithmetic only. `episode` has all rows of an episode in `sample_id` order, or only this rank's if
        `needs_all_rows` is false. `rlhf_core.episode_view.EpisodeView.of(episode)` then has per-row numbers of the
        whole episode, and sums over ranks, which every rank must call. Metrics must be the same on every rank.
        """

    @property
    def needs_all_rows(self) -> bool:
        """Whether `advantages` is given all rows on every rank: simple, and as large as the episode is."""
        return True

    @property
    def frozen_models(self) -> Mapping[Role, FrozenModel]:
        """The model of each role besides policy, critic and reference; checked, planned for and placed by core."""
        return {}

    def passes(self, context: PassContext) -> Sequence[GroupPass]:
        """The passes over finished samples, in order; none by default.

        `rlhf_forward.model_passes(context, self.roles)` are those of the reference and the critic. Also called before
        models are loaded, to check the passes' columns: passes read `context.models` in `run`.
        """
        return ()

    @property
    def needs_trainer_log_probs(self) -> bool:
        """Whether each episode starts with `policy_log_probs` of the trainer's policy, as its `trainer_log_probs`.

        Needed to correct for an engine whose numerics differ from the trainer's, or that samples from an older policy.
        """
        return False

    def policy_log_probs(self, policy: nn.Module, batch: Experience) -> Tensor:
        """[B, A] log-probs of the sampled tokens; called only if `needs_trainer_log_probs`, without gradient.

        Usually `rlhf_forward.policy_forward(policy, batch, temperature).log_probs`.
        """
        raise TypeError(f"{type(self).__name__} needs trainer log-probs but computes none")

    @property
    def needs_greedy_answer(self) -> bool:
        """Whether the makers answer each prompt greedily, too: that answer is scored, and not trained on."""
        return False

    def keep(self, group: RolloutGroup) -> bool:
        """Whether to train on a group; a rejected one is replaced by a later prompt (dynamic sampling)."""
        return True

    def collate(self, items: Sequence[BufferItem]) -> Experience:
        from .batching import collate

        return collate(items)

    def masked(self, item: BufferItem) -> BufferItem:
        from .batching import masked

        return masked(item)


class DatasetAlgorithm(Algorithm[ItemT, BatchT]):
    """An algorithm that learns from a dataset: supervised fine-tuning, reward models, DPO."""

    @abstractmethod
    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> ItemT | None:
        """One line of the prompt source to an item; None when it is too long. Wrong lines raise `DataError`."""

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` where keys or types of a line are wrong.

        Asked of every line before training, so it should be quick: nothing is encoded here.
        """

    def prepare_items(
        self, items: Sequence[ItemT], reference: Callable[[Sequence[ItemT]], Sequence[Tensor]]
    ) -> Sequence[ItemT]:
        """Add a frozen model's values to the items (DPO's reference log-probs); called before items are used.

        `reference(items)` gives a row of `reference_forward` for each; an algorithm should cache it, since items repeat
        each epoch. Every rank is called with the same items and must make the same calls.
        """
        return items

    def start_episode(
        self,
        items: Sequence[ItemT],
        *,
        policy: Callable[[Sequence[ItemT]], Sequence[Tensor]],
        reference: Callable[[Sequence[ItemT]], Sequence[Tensor]],
    ) -> None:
        """Measure the policy as it is at the start of an episode, on its prepared items (KTO's KL).

        Both give a row of `reference_forward` for each item they are asked about, of the policy or the frozen model.
        Every rank is called with the same items and must make the same calls.
        """

    def reference_forward(self, model: nn.Module, batch: BatchT) -> Tensor:
        """[B, ...] from the start policy (or the policy, at `start_episode`), without gradient; only where asked."""
        raise TypeError(f"{type(self).__name__} names the role reference but asks nothing of it")
