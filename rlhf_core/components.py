"""The `Component` that a plugin's entry point names, and the contexts that core hands to its `build`.

`build` names a callable `build(config, context)`; `config` is an instance of the component's own pydantic
model, `context` the dataclass of its kind below. The module that `build` names is imported when a run starts,
so it may import anything; the module that holds the `Component` should import pydantic and core only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from .types import SamplingParams

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from .strategy import Strategy

API_VERSION = 3
"""Version of the plugin API: raised when a plugin made for an older core would break (docs/plugins.md, Upgrading)."""

Kind = Literal[
    "algorithms", "strategies", "rewards", "transports", "engines", "prompts", "environments", "hooks", "loggers",
    "sections", "optimizers", "schedules", "models",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Component:
    """One named thing a plugin brings."""

    summary: str
    """One line for `rlhf plugins list`."""
    config: type[BaseModel]
    """The options of its section in the run file; unknown keys are errors."""
    build: str = ""
    """`module:attr` of a callable `build(config, context)`; a section has none."""
    requires: tuple[str, ...] = ()
    """Modules it needs to run that its distribution does not insist on."""
    install: str | None = None
    """The exact command that installs what `requires` names, where a plain `pip install NAME` will not do."""
    api_version: int = API_VERSION
    """Plugin API that it was written for."""
    isolate: bool = False
    """For a reward or an environment: whether it is run in a process of its own where the run file does not say. True
    for one that hands model output to code that cannot be stopped from inside: what a model wrote must not hang a
    run."""
    feeds: Literal["rollouts", "dataset"] = "rollouts"
    """For an algorithm: whether it learns from sampled answers, or from the lines of a dataset (no rewards needed)."""
    learns_from_rewards: bool = True
    """For an algorithm on rollouts: whether a run without any reward would teach nothing, and is an error."""
    credits_turns: bool = False
    """For an algorithm: whether it gives an environment's rewards to the turns that earned them, not to the episode."""
    max_processes: int | None = None
    """For a strategy: most processes that it trains across; None is any number."""
    launch: str | None = None
    """For a strategy: `module:function` that starts a run's processes on this machine, for `--num-processes`:
    `rlhf_strategies.run_processes:run_in_processes`, or one with its arguments."""
    optimizers: tuple[str, ...] | None = None
    """For a strategy: names of the optimizers that it can hold; None is any torch optimizer over its parameters."""
    optimizer_bytes: float = 8.0
    """For an optimizer: bytes of its state per trained parameter, for `rlhf plan`."""
    trains_16_bit: bool = False
    """For an optimizer: whether 16-bit parameters keep its small steps, as with float32 master weights; else they are
    refused."""
    always_on: bool = False
    """For a hook: whether it is on when it is installed, with the options of the section of its name, if any."""
    claims: Callable[[str, Mapping[str, Any]], bool] | None = None
    """For a kind of model: whether it loads a `model.path`, given that and the folder's `config.json` ({} without)."""
    model_inputs: bool = False
    """For an engine: whether it passes `GenerationRequest.inputs` to the model."""
    in_flight: bool = False
    """For an engine: whether it takes new weights between two decoding steps (`InFlightEngine`)."""
    stages: Mapping[str, str] = field(default_factory=dict, hash=False)
    """For an algorithm: stage of the quickstart after the warm start -> option for the path of the model it makes."""
    quickstart: str | None = None
    """For an environment: `package:folder` of its `warm-start.yaml` and `run.yaml`, two run files with which
    `rlhf train --environment NAME` needs none."""


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """For `rlhf.algorithms`: build returns an `Algorithm`."""

    sampling: SamplingParams
    """How the rollouts are sampled: log-probs are compared on this distribution."""
    samples_per_prompt: int
    """Answers to each prompt."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    score: Callable[[Mapping[str, float]], float] = lambda rewards: math.fsum(rewards.values())
    """Raw rewards of one sample, by name -> its score: weighted and clipped as in the run, not normalised."""


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """For `rlhf.strategies`: build returns a `Strategy`."""

    device: str
    """`cpu` or `cuda:N`: this process's own."""


@dataclass(frozen=True, slots=True)
class OptimizerContext:
    """For `rlhf.optimizers`: build returns a `torch.optim.Optimizer` without state, of one trained model."""

    parameters: Mapping[str, nn.Parameter]
    """Name in the model -> parameter, all that are trained. A strategy may replace them before the first step."""
    lr: float
    """Peak learning rate."""
    strategy: Strategy
    """Prepares the optimizer afterwards; `make_optimizer` is its own AdamW."""


@dataclass(frozen=True, slots=True)
class ScheduleContext:
    """For `rlhf.schedules`: build returns a function of an update's index that gives the factor of the peak rate.

    It is called for updates from `warmup_updates` on, in any order, and after a resume too.
    """

    warmup_updates: int
    """Updates of linear warm-up, which core applies."""
    total_updates: int
    """Updates of the whole run, if no sample is dropped."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """For `rlhf.rewards`: build returns a `Reward`."""

    device: str
    """`cpu` or `cuda:N`: the trainer's or maker's own, where it may put a model."""
    seed: int
    """The run's seed."""
    model_path: str | None = None
    """Where the policy was loaded from: a reward may ask whether its tokenizer is the policy's. None where a reward
    is asked outside a run, with no policy there (`rlhf serve-reward`, the seed's classes)."""
    folder: Path | None = None
    """In a run folder, where a reward may keep files of its own; the makers of one machine share it. None without."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """For `rlhf.engines`: build returns a `RolloutEngine`."""

    model: nn.Module
    """The policy: shared with the trainer (changed in place, then `weights_updated`) or the engine's own copy."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    device: torch.device
    """Where it generates: `cpu` or `cuda:N`."""
    seed: int
    """Run seed of the sampling noise."""
    model_path: str | None = None
    """Where the policy was loaded from, for engines that load their own."""
    compute_dtype: torch.dtype | None = None
    """Type in which the trainer's forward multiplies float32 weights (`Place.compute_dtype`); None is float32."""
    in_flight: bool = False
    """Whether `generate_in_flight` is called, instead of `generate`."""


@dataclass(frozen=True, slots=True)
class TaskContext:
    """For `rlhf.prompts` and `rlhf.environments`: build returns a `PromptSource`, or an environment for one episode."""

    seed: int
    """The run's seed; an episode should depend on its task's `seed` and `sample_seed` instead."""
    base_folder: Path = field(default_factory=Path.cwd)
    """Relative paths in the options start here."""
    has_chat_template: bool = False
    """For a source: whether the model's tokenizer has one, so that it may give chat messages."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """For `rlhf.hooks`: build returns an object with `rlhf_…` hooks, in each process where hooks are called.

    It may also have `state_dict()`, of JSON values, and `load_state_dict(state)`: checkpoints keep the state of the
    object on rank 0 of the trainer, and a resume gives it back before the first episode.

    For `rlhf.loggers`: build returns a `Logger`, in the process that was started.
    """

    run_folder: Path
    """The run folder, which exists; relative paths in the options start here, and its name is the run's."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The resolved run file, without its secrets."""
