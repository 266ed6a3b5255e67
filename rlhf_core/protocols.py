"""Protocols between the parts of a run.

These are structural types: a class conforms by having the methods, without a base class. Annotate the result of `build`
with its protocol, so that a type checker compares the two. `Strategy` and `Algorithm` provide behavior to subclasses
and are therefore abstract classes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from .types import BufferItem, CollectedEpisode, Completion, GenerationRequest, Rollout, RolloutGroup, SamplingParams

Score: TypeAlias = "float | Mapping[int, float]"
"""A number for one answer, or numbers for some of its turns."""


class Reward(Protocol):
    """A callable, plain or async, that returns one finite number per answer, in order.

    Core calls it in each process that samples answers, with batches of finished answers, on a separate thread while
    later answers are generated. Calls may be concurrent. Keyword-only parameters of a function are its options. For an
    episode of several turns it may return, instead of a number, a mapping from the index of a policy turn (from 0) to a
    number. The score is then their sum.

    Example:
        for batch in batches_of(finished_rollouts):  # on each sampling rank
            scores = reward(batch)  # or `await reward(batch)`, within timeout_seconds
            check_scores(scores, len(batch))  # one finite number per rollout, else on_failure applies
            send(batch, scores)

        def brevity(rollouts: Sequence[Rollout], *, scale: float = 0.01) -> list[float]:
            return [-scale * len(rollout.completion) for rollout in rollouts]
    """

    def __call__(self, rollouts: Sequence[Rollout], /) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


@runtime_checkable
class PromptSource(Protocol):
    """A finite, indexable set of records (mappings), always in the same order.

    A record has `prompt` (text, or a list of chat messages), optionally `answer`, and any other keys, which rewards
    receive as metadata. Offline algorithms read `completion`, or `chosen` and `rejected`. Core shuffles, repeats and
    holds out records, unless the source has a method `make_stream`. Each process that reads prompts builds the source,
    reads all records once to check them, and then reads single records by index.

    Example:
        source = build(config, context)  # in each process that reads prompts. A list of dicts is a source.
        digest = check_all(source[index] for index in range(len(source)))
        for position in positions_of_this_process:
            record = source[order.index(position)]
            prompt = encoder.prompt(record, position, name)
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Sampler(Protocol):
    """Chooses the records to train on, from the success of earlier ones (`Section.sampler`).

    The owner of the prompts calls its methods: with the transport `local` every rank, with the same arguments, and over
    Ray the coordinator's process. Over Ray, `judge` is called on another instance, in the process that made the group.

    Example:
        while episode_is_incomplete:  # one wave: all positions of an episode, or replacements for refused groups
            records = sampler.draw(num_missing, episode)
            groups = sample_answers(records)
            outcomes = {group.position: sampler.judge(group) for group in groups}
            for record, success in in_position_order(records, outcomes):  # without those that are None
                sampler.learn(record, success)
        metrics = sampler.take_metrics()
    """

    def judge(self, group: RolloutGroup) -> float | None:
        """Return the success of a finished group, or None if `learn` should not receive it.

        The result must depend on the group only, not on state or earlier calls of `learn`.

        Args:
            group: All samples of one prompt. May be empty.
        """
        ...

    def draw(self, count: int, episode: int) -> list[int]:
        """Return the records (indices in the source) of the next `count` positions.

        Args:
            count: Number of records to draw.
            episode: Index of the episode that they are for, from 0.
        """
        ...

    def learn(self, record: int, success: float) -> None:
        """Update the sampler with the success of a record's group. Called for a whole wave, in position order.

        Args:
            record: Index in the source.
            success: The result of `judge`.
        """
        ...

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. Called once per episode."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates text from the policy.

    Each process that samples answers builds one engine over the module that holds the policy's weights. Core sets the
    `request_options` and `columns` of its config class (`EngineConfig`) as attributes of the engine. Core refuses
    requests with other options and completions with other columns.

    Example:
        engine = build(config, context)  # on each sampling rank
        for version in range(num_episodes):
            engine.weights_updated(version)  # the module's weights changed in place
            for completion in engine.generate(requests, sampling):
                use(completion)
        engine.close()
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next sample will come from."""

    @property
    def context_tokens(self) -> int | None:
        """Maximum number of prompt and response tokens together. None if unlimited."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield one completion per request as soon as it is finished, in any order.

        The answer to a request must depend only on its prompt, the weights, `sampling`, and its `sample_id`, `branch`
        and `offset`, never on the other requests of the batch.

        Args:
            requests: Each pair of `sample_id` and `branch` occurs once.
            sampling: Parameters that all requests share.
        """

    def weights_updated(self, version: int) -> None:
        """Discard everything derived from the module's weights, which changed in place.

        Called after training changed them, or after new weights were received.

        Args:
            version: The new policy version.
        """

    def close(self) -> None:
        """Release all resources. Called once, at the end."""


SamplingRequest = tuple[GenerationRequest, SamplingParams]
"""A request and its sampling parameters."""


@runtime_checkable
class InFlightEngine(RolloutEngine, Protocol):
    """An engine that accepts requests and new weights between two decoding steps. Its component sets `in_flight`.

    Core calls `generate_in_flight` instead of `generate`, on each sampling rank, if `EngineContext.in_flight` is set.
    An engine may also have `cancel(sample_id, branch=0)`, called inside `between`. The canceled request then yields no
    completion.

    Example:
        def between() -> list[SamplingRequest]:
            if (version := receive_weights()) is not None:
                engine.weights_updated(version)
            return take_new_requests()

        for completion in engine.generate_in_flight(between):
            use(completion)
    """

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Yield each completion as soon as it is finished, until no request is open and `between` returns none.

        After a weight update, open answers continue from their existing keys and values. No other state of the old
        weights is used, and `Completion.policy_versions` records the weights that sampled each token.

        Args:
            between: Called before every decoding step, while nothing is computed. Returns new requests, and may change
                the weights and call `weights_updated`. Open requests differ in `sample_id` or `branch`.
        """


class EpisodeData(Protocol):
    """The tokens and texts of an episode's samples, in this or another process."""

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        """Return the items of `rows` and the rollouts of `texts`, in this order. Collective over trainer ranks.

        Args:
            rows: Indices in `CollectedEpisode.rows`, different on each rank.
            texts: Indices in the same rows, of the rollouts that this rank needs.

        Raises:
            SamplesLost: On all ranks, if some samples are lost. The channel samples those again, and its `episode` then
                returns the whole episode.
        """


class ExperienceChannel(Protocol):
    """Provides a trainer with the samples of episodes and with evaluations. All methods are collective over ranks."""

    def episode(self, index: int) -> CollectedEpisode:
        """Return the episode once all its samples are complete. The same on every trainer rank."""

    def published(self, version: int) -> None:
        """Note that a policy version is published, so that prompts waiting for it may start."""

    def evaluate(self) -> Mapping[str, float]:
        """Score the newest published policy on held-out prompts."""

    def state_dict(self) -> dict[str, Any]:
        """Prompt cursor, ledger and finished, untrained groups, as plain values and tensors (see `tensor_files`)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, also in the middle of a run (a rollback). Later groups are discarded."""

    def states(self) -> list[dict[str, Any]]:
        """One entry per process that makes samples: `rewards` and `players`. Empty if they keep no state."""

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of rewards and players."""


@runtime_checkable
class Logger(Protocol):
    """Sends the metrics of a run to a tracking server, a database or a file.

    Core calls it only in the process that the user started (rank 0). It opens its resources at the first `log`, since a
    run may make no update. `log` may be called again after `finish`, and for a `step` that was logged before: a resume
    or a rollback repeats updates.

    Example:
        logger = build(config, context)  # in the process that the user started (rank 0)
        try:
            for step, metrics in enumerate(updates, start=1):
                logger.log(step, metrics)
        finally:
            logger.finish(failed)
    """

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Log one line of `metrics.jsonl`.

        Args:
            step: Number of the update, from 1.
            values: Metric name -> finite number.
        """

    def finish(self, failed: bool, /) -> None:
        """Write queued values and close.

        Args:
            failed: Whether the training ended with an error.
        """
