"""The events of a run that a hook plugin can listen to.

A hook plugin is any object or module with methods named as below. Mark them with `hookimpl` or just use the names, and
declare only the arguments you need, by name. Every `_start` is followed by its `_end`, whose `error` is the failure or
None. Events without a `_start`, such as `update`, also fire their `_end` after a failure. A plugin may get an `_end`
without its `_start`, if the `_start` of another plugin failed.

Setup hooks run in the process that the user started, trainer hooks on rank 0 of the trainer, and maker hooks in the
processes that generate answers. With the transport `local` these are one process. Order within a run:

    transform_config, run_start
      fit_start
        episode_start
          make_experience_start, reward_end, make_experience_end   (maker)
          epoch_start, batch_start, update_end, batch_end, decide, epoch_end
          sync_start, sync_end
          eval_end, decide, metrics
        episode_end
      fit_end
    run_end

`batch` is one training batch. `update` is the optimizer step in that batch, or in the last of several batches that are
accumulated into one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pluggy

from .types import RolloutGroup

PROJECT = "rlhf"
PREFIX = "rlhf_"
"""Prefix of every hook's name."""
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator that marks a hook, as pluggy's markers do: `@hookimpl(tryfirst=True)`."""

Metrics = Mapping[str, Any]
"""Key -> value, as in `metrics.jsonl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInfo:
    """Facts about a fit, for progress, logging and performance figures."""

    algorithm: str
    """Name of the algorithm."""
    num_episodes: int
    """Episodes of the whole run, including those before a resume."""
    first_episode: int = 0
    """First episode of this fit, above 0 after a resume."""
    samples_per_episode: int | None = None
    """Answers or dataset lines. None if not known."""
    updates_per_episode: int | None = None
    """Optimizer steps. None if not known."""
    num_parameters: Mapping[str, int] = field(default_factory=dict)
    """Role (`policy`, `critic`, `reference`) -> number of parameters of its model."""
    world_size: int = 1
    """Number of training processes."""
    device: str = "cpu"
    """Device of the trainer."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of the run at which hook plugins may decide how it continues."""

    at: Literal["update", "failed-update", "episode", "paused"]
    """`update`: after an update. `failed-update`: in place of an update that was not made. `episode`: after an episode
    and its evaluation. `paused`: repeatedly while a run is paused."""
    step: int
    """Updates of the run so far. For a failed update, the number it would have had."""
    episode: int
    """Index of the episode, from 0."""
    metrics: Metrics
    """Values of the episode and the update so far. After an episode, those of its last line, including `eval/*`."""
    error: BaseException | None = None
    """Reason the update was not made (a `DivergenceError`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A hook plugin's decision about the run. All processes execute it at the same moment."""

    kind: Literal["skip", "finish", "rollback", "stop", "interrupt", "pause", "resume", "checkpoint", "set"]
    """`skip`: leave out the rest of the episode's updates, or a failed update. `finish`: end the run as done, with its
    model, after the episode. `rollback`: return to the last good checkpoint. `stop`: end the run as failed
    (`GuardStop`). `interrupt`: end it after the episode with a checkpoint, as Ctrl-C does. `pause`: wait for a signal,
    `resume` or `interrupt`. `checkpoint`: write one at the end of the episode. `set`: change an option."""
    by: str
    """Name of the requester: a guard, or the hook plugin as the run file names it."""
    reason: str
    """Reason for the decision, with the numbers."""
    hint: str | None = None
    """Change that an error should suggest."""
    key: str | None = None
    """For `set`: `optimizer.lr` or `optimizer.critic_lr` (peak learning rates), or `algorithm.kl_coef`."""
    value: float | None = None
    """For `set`: the new value."""
    lr_factor: float = 0.5
    """For `rollback`: factor on every learning rate."""
    max_times: int = 3
    """For `rollback`: maximum number of rollbacks of a run. A further one ends the run as failed."""
    answer: Callable[[str, bool], None] | None = field(default=None, compare=False)
    """Function of the result as text and of whether the action was rejected, called on rank 0 for `interrupt`, `pause`,
    `resume`, `checkpoint` and `set`. An action without it is recorded in the manifest as the event `decision`.
    `interrupt` is always recorded."""

    def __post_init__(self) -> None:
        if self.kind == "set" and (self.key is None or self.value is None or not 0 <= self.value < math.inf):
            raise ValueError(f"an Action of kind set needs a key and a value of 0 or more, got {self.key}={self.value}")


class SetupHooks:
    """Hooks in the process that the user started."""

    @hookspec
    def rlhf_transform_config(self, config: dict[str, Any]) -> Mapping[str, Any] | None:
        """Change the run file before it is checked. Return a changed copy, or None to leave it unchanged.

        `config` includes the changes of earlier plugins. `docs/hooks.md` explains the order and wrappers.
        """

    @hookspec
    def rlhf_run_start(self, run_folder: Path, config: Metrics) -> None:
        """The run folder exists, and no model is loaded yet. `config` is the resolved run file."""

    @hookspec
    def rlhf_run_end(
        self, run_folder: Path, config: Metrics, summary: Metrics | None, error: BaseException | None
    ) -> None:
        """The run is over. `summary` is the content of `summary.json`, or None if the run ended before writing it."""


class TrainerHooks:
    """Hooks on rank 0 of the trainer."""

    @hookspec
    def rlhf_fit_start(self, info: FitInfo) -> None:
        """Models are loaded and prepared. The first episode comes next."""

    @hookspec
    def rlhf_fit_end(self, info: FitInfo, error: BaseException | None) -> None:
        """The last episode is over, or the fit failed with `error`."""

    @hookspec
    def rlhf_episode_start(self, episode: int) -> None:
        """An episode starts. `episode` counts from 0 over the whole run."""

    @hookspec
    def rlhf_episode_end(self, episode: int, metrics: Metrics | None, error: BaseException | None) -> None:
        """An episode is over. `metrics`: its values and times, as in its last line, or None if it failed."""

    @hookspec
    def rlhf_epoch_start(self, episode: int, epoch: int) -> None:
        """A pass over the samples of the episode starts."""

    @hookspec
    def rlhf_epoch_end(self, episode: int, epoch: int, error: BaseException | None) -> None:
        """The pass has trained on every batch, or failed with `error`."""

    @hookspec
    def rlhf_batch_start(self, episode: int, epoch: int, batch: int, experience: Any) -> None:
        """`experience`: this rank's part of the batch, in the seed's classes an `Experience`. `batch` counts from 0."""

    @hookspec
    def rlhf_batch_end(
        self,
        episode: int,
        epoch: int,
        batch: int,
        experience: Any,
        metrics: Metrics | None,
        error: BaseException | None,
    ) -> None:
        """`metrics`: metrics of the update on this batch, or None if it failed."""

    @hookspec
    def rlhf_update_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        """An optimizer step, which writes line `step` (from 1) of `metrics.jsonl`, is done or has failed.

        `metrics`: values known immediately (losses, gradient norm). `rlhf_metrics` gets the complete line later.
        """

    @hookspec
    def rlhf_decide(self, moment: Moment) -> Action | Sequence[Action] | None:
        """Decide how the run continues at a moment. Called in the process of the training loop. None changes nothing.

        Of several skip, finish, rollback and stop actions, only the most severe one is executed (stop, then rollback,
        finish, skip). All others are executed before it, in order. Handle only the moments you know, as later versions
        may add more.
        """

    @hookspec
    def rlhf_sync_start(self, version: int) -> None:
        """The new weights are sent to the generating engines, as `policy_version` = `version`."""

    @hookspec
    def rlhf_sync_end(self, version: int, error: BaseException | None) -> None:
        """All receivers have `version`. With `error`, they keep the previous one."""

    @hookspec
    def rlhf_eval_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        """Held-out prompts were answered. `step`: 0 before the first update. `metrics`: the `eval/*` values."""

    @hookspec
    def rlhf_metrics(self, line: Metrics) -> None:
        """A complete line of `metrics.jsonl` has been written."""


class MakerHooks:
    """Hooks in the processes that generate answers."""

    @hookspec
    def rlhf_maker_loop_start(self, maker: int) -> None:
        """A maker starts requesting prompts. `maker` counts from 0."""

    @hookspec
    def rlhf_maker_loop_end(self, maker: int, error: BaseException | None) -> None:
        """The maker has requested its last prompts, or failed with `error`."""

    @hookspec
    def rlhf_make_experience_start(self, num_prompts: int, num_samples: int) -> None:
        """Prompts become scored groups: generation, rewards, log-probs, values."""

    @hookspec
    def rlhf_make_experience_end(
        self,
        num_prompts: int,
        num_samples: int,
        groups: Sequence[RolloutGroup] | None,
        error: BaseException | None,
    ) -> None:
        """`groups`: the new groups, one per prompt with all its samples, or None if making them failed."""

    @hookspec
    def rlhf_reward_end(self, num_samples: int, error: BaseException | None) -> None:
        """All `num_samples` answers have their scores, or a reward failed with `error`."""

    @hookspec
    def rlhf_send_start(self, num_groups: int) -> None:
        """Finished groups are sent to the trainers' buffers (detached transports)."""

    @hookspec
    def rlhf_send_end(self, num_groups: int, error: BaseException | None) -> None:
        """The buffers accepted the groups. With `error`, they did not."""


Part = Literal["setup", "trainer", "maker"]
SPECS: Mapping[Part, type] = {"setup": SetupHooks, "trainer": TrainerHooks, "maker": MakerHooks}
