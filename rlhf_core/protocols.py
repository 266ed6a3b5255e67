"""Protocols between the parts of a run.

Structural types: a class conforms by having the methods, without a base class. Annotate the result of `build` with
its protocol, so that a type checker compares the two. `Strategy` and `Algorithm`, which provide behaviour to
subclasses, are abstract classes instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from .types import BufferItem, CollectedEpisode, Completion, GenerationRequest, Rollout, RolloutGroup, SamplingParams

Score: TypeAlias = "float | Mapping[int, float]"
"""A number for one answer, or numbers for some of its turns."""


class Reward(Protocol):
    """Scores answers: one finite number each, in order. A plain function is one; it may be async.

    Its keyword-only parameters are its options. For an episode of several turns it may give, in place of a number, a
    mapping of its policy turns, counted from 0, to numbers, whose sum is the score.
    """

    def __call__(self, rollouts: Sequence[Rollout], /) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


@runtime_checkable
class PromptSource(Protocol):
    """A finite, indexable set of records (one mapping a line), always in the same order.

    A record has `prompt` (text, or a list of chat messages), optionally `answer`, and any other keys,
    which reach the reward as metadata. Offline algorithms read `completion`, or `chosen` and `rejected`.
    Shuffling, repetition and holding out are core's, unless the source has a method `make_stream` for them.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Sampler(Protocol):
    """Decides which records are drawn, from the success of those drawn before (`Section.sampler`)."""

    def judge(self, group: RolloutGroup) -> float | None:
        """Return the success of a finished group; None if `learn` should not receive it.

        Called where the answers are made, over Ray on another instance: it must not depend on `learn` or a state.
        """
        ...

    def draw(self, count: int, episode: int) -> list[int]:
        """The records of the next `count` positions, for an episode."""
        ...

    def learn(self, record: int, success: float) -> None:
        """Take in the success of a record's group."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates text from the policy.

    What its config class declares as `request_options` and `columns` (`EngineConfig`), core sets as attributes of the
    engine. It refuses a request with an option that is not among them, and a completion with another column.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next sample will come from."""

    @property
    def context_tokens(self) -> int | None:
        """Longest sequence, prompt and response together; None where there is no bound."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield one completion per request, in any order, each as soon as it is done.

        The answer to a request depends on its prompt, the weights, `sampling` and its `sample_id`, `branch` and
        `offset` only, never on what else is in the batch.
        """

    def weights_updated(self, version: int) -> None:
        """Called after the module that the engine was built over changed in place: by training, or by weights that
        arrived. Drop everything derived from it.
        """

    def close(self) -> None: ...


SamplingRequest = tuple[GenerationRequest, SamplingParams]
"""A request, and how to sample for it."""


@runtime_checkable
class InFlightEngine(RolloutEngine, Protocol):
    """An engine that takes requests and new weights between two decoding steps. Its component says `in_flight`.

    It may have `cancel(sample_id, branch=0)`, called in `between`: that open request yields no completion.
    """

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer what `between` returns, each as soon as it is done, until all is answered and it returns nothing.

        `between` is called before every decoding step, while nothing is computed. It may change the weights and call
        `weights_updated`: answers under way then go on from their own keys and values, no other state
        of the old weights is used, and `Completion.policy_versions` says which weights sampled each token. No two open
        requests have one `sample_id` and `branch`.
        """


class EpisodeData(Protocol):
    """The tokens and texts of an episode's samples, wherever they are."""

    def load(self, rows: Sequence[int], texts: Sequence[int]) -> tuple[list[BufferItem], list[Rollout]]:
        """Return the items and rollouts of these `CollectedEpisode.rows`, in this order. Each rank requests its own.

        Collective over trainer ranks. Raises `SamplesLost` on all of them when some cannot be had any more: the
        channel makes those again, and its `episode` gives the whole episode once more.
        """


class ExperienceChannel(Protocol):
    """Gives a trainer the samples of an episode, and evaluations, wherever they are made. Collective over ranks."""

    def episode(self, index: int) -> CollectedEpisode:
        """The episode once all its samples are made, the same on every trainer rank."""

    def published(self, version: int) -> None:
        """Called when a policy version is published: prompts that waited for it may start."""

    def evaluate(self) -> Mapping[str, float]:
        """Score the newest published policy on held-out prompts."""

    def state_dict(self) -> dict[str, Any]:
        """Prompt cursor, ledger and finished, untrained groups: plain values and tensors (see `tensor_files`)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, also in the middle of a run on a rollback: later groups are discarded."""

    def states(self) -> list[dict[str, Any]]:
        """One entry for each process that makes samples: `rewards` and `players`. Empty if none keeps any state."""

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give rewards and players back what they kept."""


@runtime_checkable
class Logger(Protocol):
    """Takes the numbers of a run somewhere: to a tracking server, a database, a file.

    It opens what it needs at the first `log`, since a run may make no update. `log` may be called again after
    `finish`, with updates that were logged before: after a resume or a rollback they are made anew.
    """

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """The finite numbers of one line of `metrics.jsonl`, by their names there; `step` counts updates from 1."""

    def finish(self, failed: bool, /) -> None:
        """Write what is queued and close; `failed`: the training ended with an error."""
