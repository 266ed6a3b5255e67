"""The core sections of a run file: every option with its type, bounds, unit and meaning.

The plugins of the other sections (`algorithm`, `strategy`, `engine`, `transport`, `prompts`, `optimizer`, each of
`rewards`) define their own models. The options that core itself reads from these sections are here: `EngineConfig`,
`PromptsConfig`, `OptimizerConfig`, `RewardEntry`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, StrictInt, model_validator

from ..columns import Column
from ..plugins.discovery import PluginRef, discover, find
from ..types import SamplingParams
from .evaluation import EvalConfig as EvalConfig
from .evaluation import EvalSetOptions as EvalSetOptions
from .load import OWN_REWARD
from .problems import Problem
from .processes import can_hold, strategies_with
from .section import Count
from .section import Section as Section

if TYPE_CHECKING:
    from ..components import Component
    from ..plugins.selected import SelectedPlugin
    from .resolved import ResolvedRun


class LoraConfig(Section):
    """Low-rank adapters on the policy. The reference is then the policy with its adapter switched off."""

    r: Count = Field(16, description="Rank of the adapter matrices.")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapter: its output is multiplied by alpha / r.")
    rslora: bool = Field(False, description="Multiply it by alpha / sqrt(r) instead (Kalajdzievski 2023).")
    dora: bool = Field(False, description="Also train the norm of each row of the weights (DoRA, Liu 2024).")
    init: Literal["default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_16"] = Field(
        "default", description="Initialization, by PEFT. pissa and olora start inside the base weights."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="On the adapter's input, in training on datasets only.")
    target_modules: list[str] | None = Field(None, min_length=1, description="Names of layers. null: all linear ones.")


_RESERVED_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatConfig(Section):
    """How chat messages become text, wherever the model is used. Stored in the chat template of the final policy."""

    template: str | None = Field(None, min_length=1, description="Jinja file that replaces the tokenizer's template.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the template, such as {enable_thinking: false}, with JSON values.",
    )
    tools: str | None = Field(
        None,
        min_length=1,
        description="JSON file with a list of tools in the OpenAI format, shown if a conversation does not set tools.",
    )
    system: str | None = Field(None, description="System message of conversations without one.")

    @model_validator(mode="after")
    def _check_kwargs(self) -> ChatConfig:
        for name in self.kwargs:
            if not name.isidentifier() or name in _RESERVED_KWARGS:
                raise ValueError(f"kwargs: {name!r} cannot be set, only variables of the template can")
        return self


class ModelConfig(Section):
    """The policy model to train."""

    path: str = Field(min_length=1, description="Model folder, hub name, or `builtin:NAME`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Dtype of the loaded weights. auto is float32, also on a GPU, which computes in bf16 "
        "(strategy.precision). Trained 16-bit weights have float32 masters in the optimizer.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda or cuda:N. auto: a GPU if any."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, which saves memory and takes time."
    )
    offload_reference: bool = Field(
        False,
        description="Keep the reference in host memory while it is not used, which frees GPU memory. No effect with "
        "LoRA, whose reference is the policy itself, and with strategies that shard the reference.",
    )
    lora: LoraConfig | None = Field(None, description="Train only low-rank adapters. If null, all weights.")
    quantize: Literal["nf4", "int8"] | None = Field(None, description="Type of frozen linear weights, with lora.")
    chat: ChatConfig | None = Field(None, description="Chat template and its options. If null, the tokenizer's.")
    allow_missing_weights: bool = Field(
        False, description="Randomly initialize weights that the model's files lack, instead of failing."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with a hub model. Only for sources you trust."
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if self.device == "mps":
            yield Problem("device", "mps (Apple GPUs) is not supported, only cpu and cuda are", "use device: auto")
        if self.trust_remote_code and run.trust.runs and not run.trust.allows_model(self.path):
            problem = f"would run code of {self.path}, which is not trusted"
            yield Problem("trust_remote_code", problem, "if you trust the model, add --trust")
        if self.dtype in ("bfloat16", "float16") and not run.optimizer.component.trains_16_bit:
            name, hint = run.optimizer.name, "use dtype: float32 (arithmetic may still be bf16), or optimizer: adamw"
            problem = f"{name} does not keep float32 master weights: in {self.dtype} its small steps are rounded away"
            yield Problem("dtype", problem, hint)


class PromptsConfig(Section):
    """Options of every prompt source. A source's config may subclass this, otherwise it gets these options, too."""

    max_prompt_tokens: Count = Field(512, description="Maximum length of a prompt to train on, in tokens.")
    too_long: Literal["skip", "error"] = Field("skip", description="Whether to skip a longer prompt or fail.")
    duplicates: Literal["skip"] | None = Field(None, description="skip drops repeated prompts. If null, all are kept.")
    filter: str | None = Field(
        None,
        pattern=r"\.py:\w+$",
        description="FILE.py:FUNCTION that returns whether to use a record, for example by its language.",
    )


class EngineConfig(Section):
    """Options of every engine. An engine's config may subclass this, otherwise it gets these options, too."""

    max_new_tokens: Count = Field(128, description="Maximum answer length, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Softmax temperature of sampling.")
    top_k: int = Field(0, ge=0, description="Sample only from the k most likely tokens. 0 is off.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the smallest set with this probability. 1 is off.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Strings that end an answer, besides the end-of-sequence token."
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further options of every request, by the names that the engine accepts."
    )

    request_options: ClassVar[Mapping[str, str]] = {}
    """Request option that the engine accepts -> its meaning."""
    columns: ClassVar[Mapping[str, Column]] = {}
    """Columns that the engine's completions may have, besides core's `temperature`."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        accepted = self.request_options
        for name in self.options:
            if name in EngineConfig.model_fields:
                yield Problem(f"options.{name}", "is an option of the section", f"set engine.{name}")
            elif name not in accepted:
                problem = f"the engine {run.engine.name} does not accept this request option"
                yield Problem(f"options.{name}", problem, f"it accepts {', '.join(accepted) or 'none'}")

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of the run's rollouts."""
        options = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return SamplingParams(**{**options, "stop": tuple(self.stop)})


class OptimizerConfig(Section):
    """Options of every optimizer. An optimizer's config may subclass this, otherwise it gets these options, too."""

    lr: float = Field(1e-6, ge=0, description="Peak learning rate of the policy.")
    critic_lr: float | None = Field(None, ge=0, description="Peak learning rate of the critic. If null, lr.")
    schedule: dict[str, Any] = Field(
        default_factory=lambda: {"name": "constant"},
        description="Learning-rate schedule after warm-up: its name, or a mapping with its options.",
    )
    warmup_episodes: int = Field(0, ge=0, description="Episodes over which the learning rate rises from 0.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip gradients to this global norm. null is off.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        name, strategy = run.optimizer.name, run.strategy
        if not can_hold(strategy.component, name):
            problem = f"strategy {strategy.name} supports only {', '.join(strategy.component.optimizers or ())}"
            yield Problem("name", f"{problem}, not {name}", strategies_with(lambda each: can_hold(each, name)))


class RewardCallOptions(Section):
    """How core runs a reward, regardless of its author. These options are set in the reward's entry of `rewards`."""

    removed: ClassVar[Mapping[str, str]] = {
        "cache": "sampled answers rarely repeat, and the judge reward caches its replies itself. Remove the option",
    }

    batch_size: Count | None = Field(None, description="Answers scored per call. If null, all at once.")
    concurrency: Count = Field(1, description="Number of concurrent calls.")
    timeout_seconds: float = Field(60.0, gt=0, description="Deadline of one call, in seconds.")
    retries: int = Field(0, ge=0, description="Number of times to retry a failed call.")
    on_failure: Literal["fail", "zero", "drop"] = Field(
        "fail", description="If a call still fails: end the run, score its answers 0, or drop them."
    )
    isolate: bool | None = Field(
        None, description="Run in a separate process that can be killed at a deadline. If null, the reward's default."
    )
    memory_limit_bytes: Count | None = Field(
        None, description="With isolate: resident memory that ends the process. If null, half of the available memory."
    )

    def fitted_to(self, reward: Component) -> Self:
        """Return the options with the reward's own default of `isolate`, if that is not set."""
        return self if self.isolate is not None else self.model_copy(update={"isolate": reward.isolate})

    def callers(self) -> list[PluginRef]:
        """Return the callers of a reward with these options, outermost first.

        Callers for every reward come first, by name, then `isolate` for a reward that sets this option. Raises
        `PluginError` if one is not installed.
        """
        always = sorted(discover("reward_callers").keys() - {"isolate"})
        return [find("reward_callers", name) for name in (*always, *["isolate"] * bool(self.isolate))]


METRICS_OF_SCORE = ("mean", "std", "clip_fraction", "score_mean", "score_std", "normaliser_mean", "normaliser_std")
"""Names in `reward/…` that `rewards/combiner.py` logs for the weighted score, reserved as labels of rewards."""


class RewardEntry(RewardCallOptions):
    """Options that core adds to a reward's own in its entry of `rewards`."""

    weight: float = Field(1.0, description="Factor of this reward in the combined score.")
    label: str | None = Field(
        None, min_length=1, description="Name in metrics and samples. If null, the reward's own name."
    )

    def with_plugin(self, plugin: SelectedPlugin) -> Self:
        self.fitted_to(plugin.component).callers()
        # `./my_reward.py:brevity` is called brevity
        return self.model_copy(update={"label": self.label or plugin.name.rpartition(":")[2]})


class RewardScaling(Section):
    """Scaling and clipping of an answer's combined score before advantages are computed."""

    clip: tuple[float, float] | None = Field(
        None, description="[low, high] bounds of the combined score. null is off. The clipped fraction is logged."
    )
    normalise: bool = Field(
        False, description="Subtract the running mean of all combined scores and divide by their standard deviation."
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        scales = self.clip is not None or self.normalise
        if scales and OWN_REWARD in run.reward_weights and run.algorithm.component.credits_turns:
            message = f"{run.algorithm.name} gives each turn its own reward, but clip and normalise act on their sum"
            yield Problem("", f"{message}: remove them, or use an algorithm without a critic")

    @model_validator(mode="after")
    def _check_order(self) -> RewardScaling:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip needs low < high, got {list(self.clip)}")
        return self


DEFAULT_BATCH_SIZE = 64


def _batch_size(data: dict[str, Any]) -> int:
    return min(DEFAULT_BATCH_SIZE, int(data["prompts_per_episode"]) * int(data["samples_per_prompt"]))


class TrainConfig(Section):
    """Amount of training. All counts are global, regardless of the number of processes."""

    removed: ClassVar[Mapping[str, str]] = {
        "compile": "updates run on rows without padding, which is as fast. Remove the option",
    }

    episodes: Count = Field(50, description="Rounds of sampling and training (offline: rounds of training).")
    prompts_per_episode: Count = Field(64, description="Prompts per episode (offline: dataset lines).")
    samples_per_prompt: Count = Field(1, description="Answers sampled per prompt.")
    train_batch_size: Count = Field(
        default_factory=_batch_size,
        description="Samples per update. By default 64, or all of the episode if it has fewer.",
    )
    micro_batch_tokens: Count | None = Field(
        None,
        description="Maximum tokens per forward and backward pass, which bounds memory and does not change results. "
        "Null: on a CPU 1,024 (from 50M parameters on 192, fast bf16 512, answers to a prompt 1,024), on a GPU 16,384.",
    )
    epochs_per_episode: Count = Field(1, description="Number of passes over the samples of an episode.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of all randomness in the run.")

    @property
    def samples_per_episode(self) -> int:
        """Answers (or dataset lines) per episode."""
        return self.prompts_per_episode * self.samples_per_prompt

    @model_validator(mode="after")
    def _check_batch_size(self) -> TrainConfig:
        if self.train_batch_size > self.samples_per_episode:
            raise ValueError(
                f"train_batch_size is {self.train_batch_size}, but an episode has only {self.samples_per_episode} "
                f"samples ({self.prompts_per_episode} prompts_per_episode x {self.samples_per_prompt} "
                "samples_per_prompt): lower train_batch_size or raise one of the two"
            )
        return self


class CheckpointConfig(Section):
    """When the run saves the state that a resume needs."""

    every_episodes: Count | None = Field(
        10, description="Save every N episodes. If null, only at the end or when interrupted."
    )
    keep: Count = Field(3, description="Number of newest checkpoints to keep. Older ones are deleted.")
    best: str | None = Field(
        None,
        min_length=1,
        description="Metric, such as eval/score, whose best checkpoint is also kept. A new best is saved immediately.",
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which value of that metric is the best.")


DEFAULT_LOGGER = "tensorboard"
"""The logger that is on if it is installed, unless `logging` turns it off."""


class LoggingConfig(Section):
    """The keys of `logging` that core reads. All others are names of loggers."""

    samples: Literal["all", "none"] | Annotated[StrictInt, Field(ge=1)] = Field(
        "all", description="Samples written to samples.jsonl: all, none, or at most this many per episode."
    )
    sample_tokens: bool = Field(
        False,
        description="Also write the tokens of each sample: prompt_ids, completion_ids, logprobs, and action_mask, "
        "which is true for the tokens that the policy sampled.",
    )


class HooksConfig(Section):
    """The keys of `hooks` that core reads. All others are hook plugins with options, active if they are listed."""

    disable: list[str] = Field(default_factory=list, description="Names of hook plugins to turn off.")


class RunConfig(Section):
    """The sections of a run file that do not select a plugin."""

    model: ModelConfig
    eval: EvalConfig | None = None
    reward_scaling: RewardScaling = Field(default_factory=RewardScaling)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    hooks: HooksConfig = Field(default_factory=HooksConfig)

    @model_validator(mode="after")
    def _check_best(self) -> RunConfig:
        if (self.checkpoint.best or "").startswith("eval/") and self.eval is None:
            raise ValueError(f"checkpoint.best is {self.checkpoint.best}, but there is no eval section to measure it")
        return self
