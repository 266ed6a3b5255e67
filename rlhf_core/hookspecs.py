"""The events of a run that a hook plugin can listen to.

A hook plugin is any object or module with methods named as below; mark them with `hookimpl` or just use the
names, and take only the arguments you need, by name. What opens always closes: every `_start` is followed by its
`_end`, and an `_end` without a start is called too, with `error` set to what went wrong before (None: nothing did).

Set-up hooks run in the process that was started, trainer hooks on rank 0 of the trainer, maker hooks where
answers are made; with the transport `local` that is one process. Order within a run:

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

`batch` is one training batch; `update` is the optimizer step inside it, or inside the last of the batches that
are accumulated into one step.
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
"""Begins the name of every hook."""
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a hook, as pluggy's markers do: `@hookimpl(tryfirst=True)`."""

Metrics = Mapping[str, Any]
"""Key -> value, as `metrics.jsonl` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInfo:
    """Facts about a fit, for progress, logging and performance figures."""

    algorithm: str
    """Its name."""
    num_episodes: int
    """Episodes of the whole run, those before a resume included."""
    first_episode: int = 0
    """First episode of this fit: above 0 after a resume."""
    samples_per_episode: int | None = None
    """Answers, or dataset lines; None where not known."""
    updates_per_episode: int | None = None
    """Optimizer steps; None where not known."""
    num_parameters: Mapping[str, int] = field(default_factory=dict)
    """Role (`policy`, `critic`, `reference`) -> parameters of the model."""
    world_size: int = 1
    """Processes that train."""
    device: str = "cpu"
    """Device of the trainer."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a decision is asked for."""

    at: Literal["update", "failed-update", "episode", "paused"]
    """After an update; in place of one that was not made; after an episode, evaluation included; while a run is
    paused, again and again."""
    step: int
    """Updates of the run so far; of a failed update, the one it would have been."""
    episode: int
    """From 0."""
    metrics: Metrics
    """Values of the episode and the update so far; after an episode those of its last line, `eval/*` among them."""
    error: BaseException | None = None
    """Why the update was not made (a `DivergenceError`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a hook plugin decides about the run. All processes do it at the same moment."""

    kind: Literal["skip", "finish", "rollback", "stop", "interrupt", "pause", "resume", "checkpoint", "set"]
    """skip: leave out the rest of the episode's updates, or a failed one; finish: end the run as done, with its model,
    once the episode is over; rollback: go back to the last good checkpoint; stop: end the run as failed (`GuardStop`);
    interrupt: end it after the episode with a checkpoint, as Ctrl-C does; pause: wait, until a signal, `resume` or
    `interrupt`; checkpoint: write one at the end of the episode; set: change an option."""
    by: str
    """Name of who asks: a guard's; a hook plugin's is its own, by which the run file names it."""
    reason: str
    """Why, with the numbers."""
    hint: str | None = None
    """The change that an error should propose."""
    key: str | None = None
    """For `set`: `optimizer.lr` or `optimizer.critic_lr` (peak learning rates), or `algorithm.kl_coef`."""
    value: float | None = None
    """For `set`: the new value."""
    lr_factor: float = 0.5
    """For `rollback`: every learning rate is multiplied by it."""
    max_times: int = 3
    """For `rollback`: after so many of a run, it ends it as failed."""
    answer: Callable[[str, bool], None] | None = field(default=None, compare=False)
    """Rank 0 calls it with what came of interrupt, pause, resume, checkpoint or set, and whether it was refused. An
    action without it is noted in the manifest, as event `decision`; `interrupt` always is."""

    def __post_init__(self) -> None:
        if self.kind == "set" and (self.key is None or self.value is None or not 0 <= self.value < math.inf):
            raise ValueError(
                f"an Action of kind set needs a key, and a value of 0 or more; got {self.key}={self.value}"
            )


class SetupHooks:
    """Hooks in the process that was started."""

    @hookspec
    def rlhf_transform_config(self, config: dict[str, Any]) -> Mapping[str, Any] | None:
        """Change the run file before it is checked. Return a changed copy, or None to leave it.

        `config` includes the changes of earlier plugins; order and wrappers as in `docs/hooks.md`.
        """

    @hookspec
    def rlhf_run_start(self, run_folder: Path, config: Metrics) -> None:
        """The run folder exists; no model is loaded yet. `config` is the resolved run file."""

    @hookspec
    def rlhf_run_end(
        self, run_folder: Path, config: Metrics, summary: Metrics | None, error: BaseException | None
    ) -> None:
        """The run is over. `summary` is the content of `summary.json`, None when it ended before there was one."""


class TrainerHooks:
    """Hooks on rank 0 of the trainer."""

    @hookspec
    def rlhf_fit_start(self, info: FitInfo) -> None:
        """Models are loaded and ready; the first episode comes next."""

    @hookspec
    def rlhf_fit_end(self, info: FitInfo, error: BaseException | None) -> None:
        """The last episode is over, or the fit failed with `error`."""

    @hookspec
    def rlhf_episode_start(self, episode: int) -> None:
        """`episode` counts from 0 over the whole run."""

    @hookspec
    def rlhf_episode_end(self, episode: int, metrics: Metrics | None, error: BaseException | None) -> None:
        """`metrics`: values of the episode and its times, as on its last line; None when it failed."""

    @hookspec
    def rlhf_epoch_start(self, episode: int, epoch: int) -> None:
        """One pass over the samples of the episode."""

    @hookspec
    def rlhf_epoch_end(self, episode: int, epoch: int, error: BaseException | None) -> None:
        """Every batch of the pass was trained on, or the pass failed with `error`."""

    @hookspec
    def rlhf_batch_start(self, episode: int, epoch: int, batch: int, experience: Any) -> None:
        """`experience`: the items of the training batch here, in the seed's classes an `Experience`; `batch` from 0."""

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
        """`metrics`: metrics of the update on this batch; None where it failed."""

    @hookspec
    def rlhf_update_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        """The optimizer step that writes line `step` (from 1) of `metrics.jsonl`.

        `metrics`: values known at once (losses, gradient norm); the whole line comes with `rlhf_metrics`.
        """

    @hookspec
    def rlhf_decide(self, moment: Moment) -> Action | Sequence[Action] | None:
        """Decide about the run at a moment; called where the loop runs, None means that it goes on.

        Of several skip, finish, rollback and stop, the gravest counts (stop, rollback, finish, skip); all the others
        are done, in order, before it. Take only the moments that you know: there may be more.
        """

    @hookspec
    def rlhf_sync_start(self, version: int) -> None:
        """The new weights are sent to the generating engines, as `policy_version` = `version`."""

    @hookspec
    def rlhf_sync_end(self, version: int, error: BaseException | None) -> None:
        """All receivers have `version`, or, with `error`, keep the previous one."""

    @hookspec
    def rlhf_eval_end(self, step: int, metrics: Metrics | None, error: BaseException | None) -> None:
        """Held-out prompts were answered; `step` 0 is before the first update. `metrics`: the `eval/*` values."""

    @hookspec
    def rlhf_metrics(self, line: Metrics) -> None:
        """A line of `metrics.jsonl`, complete, once it has been written."""


class MakerHooks:
    """Hooks where answers are generated."""

    @hookspec
    def rlhf_maker_loop_start(self, maker: int) -> None:
        """A maker starts asking for prompts; `maker` counts from 0."""

    @hookspec
    def rlhf_maker_loop_end(self, maker: int, error: BaseException | None) -> None:
        """The maker has no more prompts to ask for, or it failed with `error`."""

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
        """`groups`: the new groups, one per prompt with all its samples; None where making them failed."""

    @hookspec
    def rlhf_reward_end(self, num_samples: int, error: BaseException | None) -> None:
        """All `num_samples` answers have their scores, or a reward failed with `error`."""

    @hookspec
    def rlhf_send_start(self, num_groups: int) -> None:
        """Finished groups go to the trainers' buffers (detached transports)."""

    @hookspec
    def rlhf_send_end(self, num_groups: int, error: BaseException | None) -> None:
        """The buffers accepted the groups, or, with `error`, did not."""


Part = Literal["setup", "trainer", "maker"]
SPECS: Mapping[Part, type] = {"setup": SetupHooks, "trainer": TrainerHooks, "maker": MakerHooks}
