"""`Component`, the object a plugin's entry point refers to, and the contexts that core passes to its `build`.

`build` is the path of a callable `build(config, context)`: `config` is an instance of the component's own pydantic
model, and `context` is the dataclass below for its kind. Its module is imported when a run starts, so it may import
anything. The module that defines the `Component` should import only pydantic and core.
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

    from .models.kinds import ModelKind
    from .strategy import Strategy

API_VERSION = 3
"""Version of the plugin API, increased when plugins for an older core would break (docs/plugins.md, Upgrading)."""

Kind = Literal[
    "algorithms", "strategies", "rewards", "transports", "engines", "prompts", "environments", "hooks", "loggers",
    "sections", "optimizers", "schedules", "models",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Component:
    """A named object that a plugin provides, with its options and how to build it."""

    summary: str
    """One line for `rlhf plugins list`."""
    config: type[BaseModel]
    """Model of the options in its section of the run file. Unknown keys are errors."""
    build: str = ""
    """`module:attr` of a callable `build(config, context)`. Empty for a section, which is not built."""
    requires: tuple[str, ...] = ()
    """Modules it needs at run time that are not mandatory dependencies of its distribution."""
    install: str | None = None
    """Exact command that installs the modules in `requires`, if a plain `pip install NAME` does not."""
    api_version: int = API_VERSION
    """Plugin API version it was written for."""
    isolate: bool = False
    """For a reward or an environment: the default of the option `isolate`, which runs it in its own process. Set it if
    model output is passed to code that cannot be stopped within its process, so that model output cannot hang a run.
    """
    feeds: Literal["rollouts", "dataset"] = "rollouts"
    """For an algorithm: whether it learns from sampled answers or from the lines of a dataset (no rewards needed)."""
    learns_from_rewards: bool = True
    """For an algorithm on rollouts: whether it needs rewards, so that a run without any is an error."""
    credits_turns: bool = False
    """For an algorithm: whether it credits an environment's rewards to the turns that earned them, not the episode."""
    max_processes: int | None = None
    """For a strategy: maximum number of training processes. None means any number."""
    launch: str = "rlhf_strategies.run_processes:run_in_processes"
    """For a strategy: `module:function` that starts a run's processes on this machine, for `--num-processes`."""
    optimizers: tuple[str, ...] | None = None
    """For a strategy: names of the optimizers it supports. None means any torch optimizer over its parameters."""
    optimizer_bytes: float = 8.0
    """For an optimizer: bytes of optimizer state per trained parameter, for `rlhf plan`."""
    trains_16_bit: bool = False
    """For an optimizer: whether it trains 16-bit parameters without rounding small steps away, for example with float32
    master weights. If False, 16-bit parameters are an error."""
    always_on: bool = False
    """For a hook: whether it is active as soon as it is installed. A section of the same name may hold its options."""
    claims: Callable[[str, Mapping[str, Any]], bool] | None = None
    """For a kind of model: function of a `model.path` and that folder's `config.json` ({} without one) that returns
    whether this kind loads the model."""
    model_inputs: bool = False
    """For an engine: whether it passes `GenerationRequest.inputs` to the model."""
    in_flight: bool = False
    """For an engine: whether it accepts new weights between two decoding steps (`InFlightEngine`)."""
    stages: Mapping[str, str] = field(default_factory=dict, hash=False)
    """For an algorithm: quickstart stages after the warm start. Stage -> the algorithm option that takes the path of
    the model made by the stage."""
    quickstart: str | None = None
    """For an environment: `package:folder` with the run files `warm-start.yaml` and `run.yaml`, which
    `rlhf train --environment NAME` uses if it is given no run file."""


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """Context of `rlhf.algorithms`. `build` returns an `Algorithm`."""

    sampling: SamplingParams
    """Sampling parameters of the rollouts. Log-probs are compared on this distribution."""
    samples_per_prompt: int
    """Answers per prompt."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    score: Callable[[Mapping[str, float]], float] = lambda rewards: math.fsum(rewards.values())
    """Raw rewards of one sample, by name -> its score: weighted and clipped as in the run, but not normalized."""
    kind: ModelKind | None = None
    """Kind of the policy, which encodes prompts with inputs of the model. None if only text is encoded."""


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """Context of `rlhf.strategies`. `build` returns a `Strategy`."""

    device: str
    """Device of this process: `cpu` or `cuda:N`."""


@dataclass(frozen=True, slots=True)
class OptimizerContext:
    """Context of `rlhf.optimizers`. `build` returns a `torch.optim.Optimizer` without state, for one trained model."""

    parameters: Mapping[str, nn.Parameter]
    """Name in the model -> parameter, for all trained parameters. A strategy may replace them before the first step."""
    lr: float
    """Peak learning rate."""
    strategy: Strategy
    """Strategy that prepares the optimizer afterwards. Its `make_optimizer` builds its own AdamW."""


@dataclass(frozen=True, slots=True)
class ScheduleContext:
    """Context of `rlhf.schedules`. `build` returns a function from an update's index to a factor of the peak rate.

    The function is called for updates from `warmup_updates` on, in any order, also after a resume.
    """

    warmup_updates: int
    """Updates of linear warm-up, which core applies."""
    total_updates: int
    """Updates of the whole run, if no sample is dropped."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """Context of `rlhf.rewards`. `build` returns a `Reward`."""

    device: str
    """Device of the trainer or maker, on which the reward may load a model: `cpu` or `cuda:N`."""
    seed: int
    """Seed of the run."""
    model_path: str | None = None
    """Path the policy was loaded from, so that a reward can check whether it uses the same tokenizer. None outside a
    run (`rlhf serve-reward`, the seed's classes)."""
    folder: Path | None = None
    """Folder in the run folder for files of the reward, shared by the makers on one machine. None if not available."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Context of `rlhf.engines`. `build` returns a `RolloutEngine`."""

    model: nn.Module
    """Policy model: shared with the trainer (changed in place, then `weights_updated`) or the engine's own copy."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    device: torch.device
    """Device on which the engine generates: `cpu` or `cuda:N`."""
    seed: int
    """Seed of the run, for sampling noise."""
    model_path: str | None = None
    """Path the policy was loaded from, for engines that load their own copy."""
    compute_dtype: torch.dtype | None = None
    """Dtype in which the trainer's forward multiplies float32 weights (`Place.compute_dtype`). None means float32."""
    in_flight: bool = False
    """Whether core calls `generate_in_flight` instead of `generate`."""


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Context of `rlhf.prompts` and `rlhf.environments`.

    `build` returns a `PromptSource`, or an environment for one episode.
    """

    seed: int
    """Seed of the run. An episode should depend on its task's `seed` and `sample_seed` instead."""
    base_folder: Path = field(default_factory=Path.cwd)
    """Folder that relative paths in the options start from."""
    has_chat_template: bool = False
    """For a source: whether the model's tokenizer has a chat template, so that the source may return chat messages."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """Context of `rlhf.hooks` and `rlhf.loggers`.

    For `rlhf.hooks`, `build` returns an object with `rlhf_…` hooks, in each process that calls hooks. The object may
    also have `state_dict()`, which returns JSON values, and `load_state_dict(state)`. Checkpoints store the state of
    the object on rank 0 of the trainer, and a resume restores it before the first episode.

    For `rlhf.loggers`, `build` returns a `Logger`, in the process that the user started.
    """

    run_folder: Path
    """The existing run folder. Relative paths in the options start from it, and its name is the name of the run."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The resolved run file, without secrets."""
