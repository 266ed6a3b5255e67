"""The abstract `Algorithm`, which defines the update, and its two kinds.

An algorithm contains the mathematics of its loss, but no loops, devices, processes or files. The trainer divides every
summed loss term by its count over the whole update (all micro-batches of all ranks), so the gradient does not depend on
how the update was split.
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
    """A metric averaged over micro-batches and ranks: the sum of totals divided by the sum of counts."""

    total: Tensor | float
    """Sum of the values."""
    count: Tensor | float
    """Number of values. Summed over ranks before the division."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The contribution of one micro-batch to an update."""

    sums: Mapping[str, Tensor]
    """Loss term -> its sum over this micro-batch (scalar, with gradient), not yet divided by its count."""
    metrics: Mapping[str, Mean] = field(default_factory=dict)
    """Metric name -> value. The trainer adds `loss/<term>`."""
    log_probs: Tensor | None = None
    """[B, A] float32 nats, detached: this forward's log-probs, which the trainer compares with the engine's."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A named part of the objective: the model that it trains, and its weight."""

    role: Role
    """The model that learns from this term."""
    coefficient: float = 1.0
    """Factor of this term in the sum of the model's terms."""


class Item(Protocol):
    """One training sample of an algorithm: any object with a length."""

    @property
    def num_tokens(self) -> int:
        """Length in tokens, the price of the item in a micro-batch."""


ItemT = TypeVar("ItemT", bound=Item)
BatchT = TypeVar("BatchT", bound=Sized)


class Algorithm(ABC, Generic[ItemT, BatchT]):
    """The models that are trained, and their loss.

    The trainer calls every method on every rank. For each update it collates this rank's micro-batches on the CPU, sums
    their `counts` over all ranks, then calls `loss` once per micro-batch, with gradients, in the strategy's `autocast`.
    A rank with fewer micro-batches runs a `masked` item. `end_episode` follows the updates of an episode.

    Example:
        for _ in range(num_updates):
            batches = [algorithm.collate(items) for items in micro_batches]
            counts = all_reduced_sum(algorithm.counts(batch) for batch in batches)
            for batch in batches:
                sums = algorithm.loss(models, batch).sums
                backward(sum(algorithm.terms[name].coefficient * sums[name] / counts[name] for name in sums))
        algorithm.end_episode()
    """

    columns: Mapping[str, Column] = {}
    """Columns that the algorithm adds to samples."""

    @property
    @abstractmethod
    def roles(self) -> frozenset[Role]:
        """Models that the algorithm needs under its options. Core builds only these."""

    @property
    @abstractmethod
    def terms(self) -> Mapping[str, LossTerm]:
        """Loss terms whose sums `loss` returns, constant for a run."""

    @abstractmethod
    def collate(self, items: Sequence[ItemT]) -> BatchT:
        """Pad and stack items into a batch on the CPU: a dataclass, whose tensors the trainer moves to the device.

        Args:
            items: At least one, of this rank. May be a single masked item.
        """

    @abstractmethod
    def masked(self, item: ItemT) -> ItemT:
        """Return the item without effect on the loss. A rank with fewer micro-batches runs it to stay in lockstep.

        Args:
            item: Any item of this rank.
        """

    @property
    def model_kind(self) -> str:
        """Kind of model that is loaded from `model.path`, trained, and saved.

        causal-lm, sequence-classification (one label: a score), or the `model_kind` of a plugin's `ModelKind`.
        """
        return "causal-lm"

    def build_critic(self, policy: nn.Module) -> nn.Module:
        """Build the value model. Called only if `critic` is among the roles, before models are prepared.

        Args:
            policy: The freshly loaded policy, not yet on a device.
        """
        raise TypeError(f"{type(self).__name__} names the role critic but builds none")

    def units(self, items: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return the items grouped into units, which share a rank and a forward pass. By default each item is a unit.

        A global batch contains whole units, and may be smaller for that reason.

        Args:
            items: In order, an episode, a global batch or a rank's part of one, so whether two items share a unit must
                not depend on the others. Items of other ranks are summaries (`ItemSummary` for sampled answers). A
                masked filler is a separate unit.
        """
        return [[item] for item in items]

    @abstractmethod
    def counts(self, batch: BatchT) -> Mapping[str, float]:
        """Return this batch's part of the divisor (tokens, sequences) of each loss term, without running a model.

        Args:
            batch: A result of `collate`, on the CPU.
        """

    @abstractmethod
    def loss(self, models: Mapping[str, nn.Module], batch: BatchT) -> LossOutput:
        """Run the models on one micro-batch and return the sums of the loss terms.

        Args:
            models: Trained role -> module, as the strategy prepared it.
            batch: A result of `collate`, on the device.
        """

    def set_option(self, name: str, value: float) -> None:
        """Change an option during a run. Called on every rank, between updates. Raises `UserInputError` if fixed.

        Args:
            name: `kl_coef` for `rlhf control`, any option for the `Action` of a hook.
            value: The new value.
        """
        raise UserInputError(f"this algorithm's {name} cannot be changed during a run", where="algorithm")

    def end_episode(self) -> None:
        """Adapt state such as a KL controller. Called on every rank after the updates of an episode."""

    def state_dict(self) -> dict[str, Any]:
        """Return state other than weights to restore on a resume (for example of a KL controller), as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. Raises `ValueError` for a state that the algorithm does not keep."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that a `GroupPass` only runs forward: a causal LM, by default with the policy's vocabulary."""

    path: str  # as in `model.path`. Errors name it as the option `algorithm.ROLE.path`
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    offload: bool = False
    """Whether to keep the model in host memory between its passes. Ignored if a strategy shards it."""
    own_tokenizer: bool = False  # its pass encodes texts for it, so core does not compare its tokens with the policy's


class PassContext(Protocol):
    """Models and settings of a process that makes samples, for the passes of an algorithm.

    Core builds one per process that makes samples. A pass calls `forward` in its `run`, on every rank.

    Example:
        passes = algorithm.passes(context)  # once, on each sampling rank
        for each in passes:
            values = each.run(groups)  # calls context.forward(role, groups, run)
            groups = add_to_items(groups, values)
    """

    place: Place
    """Device, precision and processes."""
    models: Mapping[Role, nn.Module]
    """By role: the trained policy and critic or copies that receive their weights, and the frozen models."""
    temperature: float
    """Sampling temperature of answers."""

    def forward(
        self, role: Role, groups: Sequence[RolloutGroup], run: Callable[[nn.Module, Experience], Tensor]
    ) -> list[Tensor]:
        """Run a model without gradients over all items of the groups, in batches of bounded tokens.

        Returns [A, ...] float32 on the CPU for each item in order, without padding. Collective: all ranks make the same
        number of forward calls.

        Args:
            role: The model, which is moved to the device if it is offloaded.
            groups: This rank's groups.
            run: Called as `run(model, batch)` with a batch on the device. Returns [B, A, ...].
        """
        ...


class GroupPass(ABC):
    """A pass that adds values to finished samples, in the process that made them, for many groups at once.

    `RolloutAlgorithm.passes` builds it once per process that makes samples. `run` is called on every rank after a batch
    of groups is scored, `published` when the process has new weights. Checkpoints have its `state_dict`, if any.

    Example:
        for version in versions:
            for prompts in batches_of_this_rank:
                groups = score(sample_answers(prompts))
                groups = add_to_items(groups, group_pass.run(groups))
            group_pass.published(version + 1)
    """

    columns: Mapping[str, Column] = {}
    """Columns that the pass fills."""

    @abstractmethod
    def run(self, groups: Sequence[RolloutGroup]) -> Sequence[Mapping[str, Any]]:
        """Return a mapping per item of the groups, in order: column -> its value for this sample.

        `reference_log_probs` and `values` ([A] float32) are fields and need no declared column.

        Args:
            groups: This rank's groups, with the values of earlier passes. May be empty.
        """

    def published(self, version: int) -> None:
        """Update state that depends on the trained models in this process, which have the weights of a new version.

        Args:
            version: The policy version.
        """


class RolloutAlgorithm(Algorithm[BufferItem, Experience]):
    """An algorithm that learns from sampled answers.

    `passes` and `keep` are called in the processes that make samples, all other methods on every trainer rank. Once per
    episode the trainer calls `policy_log_probs` (if needed) and `advantages`, then the methods of `Algorithm`.

    Example:
        for episode in range(num_episodes):
            groups = [group for group in run_passes(sample_answers(prompts)) if algorithm.keep(group)]
            rows = algorithm.advantages(with_scores(collate(groups)))
            for batch in batches_of(rows):
                update(algorithm, batch)  # see Algorithm
            algorithm.end_episode()
    """

    @abstractmethod
    def advantages(self, episode: Experience) -> Experience:
        """Return the rows with `advantages` (and `returns`) from `scores`, log-probs and values, and with `metrics`.

        Runs no model. `EpisodeView.of(episode)` (`rlhf_core.episode_view`) has per-row numbers of the whole episode and
        reductions over ranks, which every rank must call. The metrics must be the same on every rank.

        Args:
            episode: All rows of an episode in `sample_id` order, or this rank's rows if `needs_all_rows` is false.
        """

    @property
    def needs_all_rows(self) -> bool:
        """Whether `advantages` receives all rows on every rank. Simple, but needs memory for the whole episode."""
        return True

    @property
    def frozen_models(self) -> Mapping[Role, FrozenModel]:
        """Models of roles other than policy, critic and reference. Core checks, plans for and places them."""
        return {}

    def passes(self, context: PassContext) -> Sequence[GroupPass]:
        """Return the passes over finished samples, in order. None by default.

        `rlhf_forward.model_passes(context, self.roles)` returns the passes of the reference and the critic. Also called
        before models are loaded, to check the passes' columns, so a pass must read `context.models` only in `run`.
        """
        return ()

    @property
    def needs_trainer_log_probs(self) -> bool:
        """Whether the trainer computes `policy_log_probs` before each episode, as `trainer_log_probs` of its rows.

        Needed to correct for an engine whose numerics differ from the trainer's, or that samples from an older policy.
        """
        return False

    def policy_log_probs(self, policy: nn.Module, batch: Experience) -> Tensor:
        """Return [B, A] log-probs (nats) of the sampled tokens. Called without gradients, if `needs_trainer_log_probs`.

        Usually `rlhf_forward.policy_forward(policy, batch, temperature).log_probs`. The batch is on the device.
        """
        raise TypeError(f"{type(self).__name__} needs trainer log-probs but computes none")

    @property
    def needs_greedy_answer(self) -> bool:
        """Whether makers also answer each prompt greedily. That answer is scored but not trained on."""
        return False

    def keep(self, group: RolloutGroup) -> bool:
        """Whether to train on a group (at least one sample). A rejected one is replaced by a later prompt."""
        return True

    def collate(self, items: Sequence[BufferItem]) -> Experience:
        from .batching import collate

        return collate(items)

    def masked(self, item: BufferItem) -> BufferItem:
        from .batching import masked

        return masked(item)


class DatasetAlgorithm(Algorithm[ItemT, BatchT]):
    """An algorithm that learns from a dataset: supervised fine-tuning, reward models, DPO.

    All methods are called on every trainer rank, once per episode, with the same records and items. The updates then
    use the methods of `Algorithm`. `check_record` is called earlier, for all records, while a run is checked.

    Example:
        for episode in range(num_episodes):
            encoded = [algorithm.encode(record, tokenizer) for record in records_of(episode)]
            items = algorithm.prepare_items([item for item in encoded if item is not None], reference)
            algorithm.start_episode(items, policy=policy, reference=reference)
            for batch in batches_of(items):
                update(algorithm, batch)  # see Algorithm
    """

    @abstractmethod
    def encode(self, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> ItemT | None:
        """Convert one record to an item, or None if it is too long. Raises `DataError` for an invalid record."""

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Raise `DataError` if keys or types of a record are wrong.

        Called for every record before training, so it should be fast and should not encode the record.
        """

    def prepare_items(
        self, items: Sequence[ItemT], reference: Callable[[Sequence[ItemT]], Sequence[Tensor]]
    ) -> Sequence[ItemT]:
        """Return the items with values of a frozen model (DPO's reference log-probs). Called before they are used.

        `reference` returns a row of `reference_forward` per item, from the frozen model. Every rank must make the same
        calls. Cache the results, since items repeat in each epoch.
        """
        return items

    def start_episode(
        self,
        items: Sequence[ItemT],
        *,
        policy: Callable[[Sequence[ItemT]], Sequence[Tensor]],
        reference: Callable[[Sequence[ItemT]], Sequence[Tensor]],
    ) -> None:
        """Measure the policy at the start of an episode, on the episode's prepared items (KTO's KL).

        Every rank must make the same calls of `policy` and `reference`.

        Args:
            items: The prepared items, the same on every rank.
            policy: Items -> a row of `reference_forward` for each, from the current policy. Collective.
            reference: The same from the frozen model. Collective.
        """

    def reference_forward(self, model: nn.Module, batch: BatchT) -> Tensor:
        """Return [B, ...] values of a frozen model or the policy, without gradients.

        Called by `reference` and `policy` of `prepare_items` and `start_episode`, with a batch on the device.
        """
        raise TypeError(f"{type(self).__name__} names the role reference but lacks a reference_forward")
