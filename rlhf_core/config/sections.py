"""The core sections of a run file: every option with its type, bounds, unit and meaning.

The plugins of the other sections (`algorithm`, `strategy`, `engine`, `transport`, `prompts`, `optimizer`, each of
`rewards`) bring their own models; what core itself reads of them is here: `EngineConfig`, `PromptsConfig`,
`OptimizerConfig`, `RewardEntry`.
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
    """Low-rank adapters on the policy; the reference is then the policy with its adapter switched off."""

    r: Count = Field(16, description="Rank of the adapter matrices.")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapter: its output is multiplied by alpha / r.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout on the adapter's input while a dataset is learnt; off where answers are sampled, since "
        "the ratio must compare one function with itself.",
    )
    target_modules: list[str] | None = Field(
        None, min_length=1, description="Names of the layers that get an adapter; null takes all linear layers."
    )


_TEMPLATES_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatConfig(Section):
    """How chat messages become text, wherever the model is used; kept in the template of the final policy."""

    template: str | None = Field(None, min_length=1, description="A Jinja file, in place of the tokenizer's template.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="What the template asks for by name, such as {enable_thinking: false}: JSON values.",
    )
    tools: str | None = Field(
        None,
        min_length=1,
        description="A JSON file, a list of tools in the OpenAI form, shown where none are given.",
    )
    system: str | None = Field(None, description="System message of conversations that have none.")

    @model_validator(mode="after")
    def _names_can_be_set(self) -> ChatConfig:
        for name in self.kwargs:
            if not name.isidentifier() or name in _TEMPLATES_OWN:
                raise ValueError(f"kwargs: {name!r} cannot be set; it has to be a name that the template asks for")
        return self


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = Field(min_length=1, description="A model folder, a hub name, or `builtin:NAME`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type the weights are loaded in. auto: float32, also on a GPU, where the arithmetic is bf16 "
        "(strategy.precision). Trained weights of 16 bits have float32 masters in the optimizer.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N; auto takes a GPU if any."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, more time."
    )
    offload_reference: bool = Field(
        False,
        description="Keep the reference in host memory while it is not asked, which frees that much of a GPU. Nothing "
        "to gain with LoRA, where it is the policy itself, and not done where a strategy divides it.",
    )
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters only; null trains all weights.")
    chat: ChatConfig | None = Field(None, description="Chat template and its options; null takes the tokenizer's.")
    allow_missing_weights: bool = Field(
        False, description="Start weights that the model's files lack from random numbers, in place of an error."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with a hub model. Only for sources you trust."
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if self.trust_remote_code and run.trust.runs and not run.trust.allows_model(self.path):
            problem = f"code of {self.path} would be run, which no one here has named"
            yield Problem("trust_remote_code", problem, "if you trust the model, add --trust")
        if self.dtype in ("bfloat16", "float16") and not run.optimizer.component.trains_16_bit:
            name, hint = run.optimizer.name, "use dtype: float32 (arithmetic may still be bf16), or optimizer: adamw"
            problem = f"{name} has no float32 master weights: in {self.dtype} its small steps are rounded away"
            yield Problem("dtype", problem, hint)


class PromptsConfig(Section):
    """Options every prompt source has. The config of one may subclass this; otherwise it gets these options, too."""

    max_prompt_tokens: Count = Field(512, description="Longest prompt trained on, in tokens.")
    too_long: Literal["skip", "error"] = Field("skip", description="What to do with a longer prompt.")
    duplicates: Literal["skip"] | None = Field(None, description="skip leaves out prompts that came before; null none.")
    filter: str | None = Field(
        None,
        pattern=r"\.py:\w+$",
        description="FILE.py:FUNCTION of a record, true for those to use: for a language, say.",
    )


class EngineConfig(Section):
    """Options every engine has. The config of an engine may subclass this; otherwise it gets these options, too."""

    max_new_tokens: Count = Field(128, description="Longest answer, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Softmax temperature of sampling.")
    top_k: int = Field(0, ge=0, description="Sample from the k likeliest tokens only; 0 is off.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the smallest set with this probability; 1 is off.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Texts that end an answer, besides the end-of-sequence token."
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Options of every request, by the names that the engine accepts."
    )

    request_options: ClassVar[Mapping[str, str]] = {}
    """Option of a request that the engine accepts -> what it does."""
    columns: ClassVar[Mapping[str, Column]] = {}
    """The columns that the engine's completions may have, besides core's `temperature`."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        accepted = self.request_options
        for name in self.options:
            if name in EngineConfig.model_fields:
                yield Problem(f"options.{name}", "is an option of the section", f"set engine.{name}")
            elif name not in accepted:
                problem = f"the engine {run.engine.name} does not accept this request option"
                yield Problem(f"options.{name}", problem, f"it accepts {', '.join(accepted) or 'none'}")

    def sampling(self) -> SamplingParams:
        """How rollouts of the run are sampled."""
        options = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return SamplingParams(**{**options, "stop": tuple(self.stop)})


class OptimizerConfig(Section):
    """Options every optimizer has. The config of one may subclass this; otherwise it gets these options, too."""

    lr: float = Field(1e-6, ge=0, description="Peak learning rate of the policy.")
    critic_lr: float | None = Field(None, ge=0, description="Peak learning rate of the critic; null takes lr.")
    schedule: dict[str, Any] = Field(
        default_factory=lambda: {"name": "constant"},
        description="Learning rate after warm-up: a schedule's name, or a mapping with its options.",
    )
    warmup_episodes: int = Field(0, ge=0, description="Episodes over which the learning rate grows from 0.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient to this global norm; null is off.")

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        name, strategy = run.optimizer.name, run.strategy
        if not can_hold(strategy.component, name):
            problem = f"strategy {strategy.name} can hold {', '.join(strategy.component.optimizers or ())} only"
            yield Problem("name", f"{problem}, not {name}", strategies_with(lambda each: can_hold(each, name)))


class RewardCallOptions(Section):
    """How core runs a reward, whoever wrote it. These keys stand in the reward's own entry of `rewards`."""

    removed: ClassVar[Mapping[str, str]] = {
        "cache": "sampled answers seldom come twice, and the reward judge keeps what it was told by itself; remove it",
    }

    batch_size: Count | None = Field(None, description="Answers scored in one call; null takes all there are.")
    concurrency: Count = Field(1, description="Calls in flight at once.")
    timeout_seconds: float = Field(60.0, gt=0, description="Deadline of one call, in seconds.")
    retries: int = Field(0, ge=0, description="Times a failed call is tried again.")
    on_failure: Literal["fail", "zero", "drop"] = Field(
        "fail", description="A call that still fails: end the run, score its answers 0, or leave them out."
    )
    isolate: bool | None = Field(
        None, description="Run in a process of its own, which a deadline can end; null leaves it to the reward."
    )
    memory_limit_bytes: Count | None = Field(
        None, description="With isolate: resident memory at which its process is ended; null is half of what there is."
    )

    def fitted_to(self, reward: Component) -> Self:
        """The options with the reward's own default of `isolate`, if that is not set."""
        return self if self.isolate is not None else self.model_copy(update={"isolate": reward.isolate})

    def callers(self) -> list[PluginRef]:
        """The callers of a reward with these options, outermost first. Raises `PluginError` if one is not installed.

        Those for every reward come first, by name, then `isolate` for a reward that sets this option.
        """
        always = sorted(discover("reward_callers").keys() - {"isolate"})
        return [find("reward_callers", name) for name in (*always, *["isolate"] * bool(self.isolate))]


METRICS_OF_SCORE = ("mean", "std", "clip_fraction", "score_mean", "score_std", "normaliser_mean", "normaliser_std")
"""Names in `reward/…` that `rewards/combiner.py` logs of the weighted score: no label of a reward."""


class RewardEntry(RewardCallOptions):
    """The options that stand beside a reward's own in its entry of `rewards`."""

    weight: float = Field(1.0, description="Factor of this reward in the combined score.")
    label: str | None = Field(
        None, min_length=1, description="Name in metrics and samples; null takes the reward's own name."
    )

    def with_plugin(self, plugin: SelectedPlugin) -> Self:
        self.fitted_to(plugin.component).callers()
        label = self.label or plugin.name.rpartition(":")[2]  # `./my_reward.py:brevity` is called brevity
        return self.model_copy(update={"label": label})


class RewardScaling(Section):
    """Scaling and clipping of an answer's combined score before advantages are computed."""

    clip: tuple[float, float] | None = Field(
        None, description="[low, high] bounds of the combined score; null leaves it. The clipped fraction is logged."
    )
    normalise: bool = Field(
        False, description="Subtract the running mean of all combined scores so far, divide by their deviation."
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        scales = self.clip is not None or self.normalise
        if scales and OWN_REWARD in run.reward_weights and run.algorithm.component.credits_turns:
            told = f"{run.algorithm.name} gives each turn its own reward, but clip and normalise act on their sum"
            yield Problem("", f"{told}: take them out, or use an algorithm without a critic")

    @model_validator(mode="after")
    def _ordered(self) -> RewardScaling:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip needs low < high, got {list(self.clip)}")
        return self


DEFAULT_BATCH_SIZE = 64


def _batch_size(data: dict[str, Any]) -> int:
    return min(DEFAULT_BATCH_SIZE, int(data["prompts_per_episode"]) * int(data["samples_per_prompt"]))


class TrainConfig(Section):
    """How much is trained. All counts are global, whatever the number of processes."""

    removed: ClassVar[Mapping[str, str]] = {
        "compile": "updates run on rows without padding, which is as fast; remove it",
    }

    episodes: Count = Field(50, description="Rounds of sampling and training (offline: rounds of training).")
    prompts_per_episode: Count = Field(64, description="Prompts sampled in an episode (offline: dataset lines).")
    samples_per_prompt: Count = Field(1, description="Answers sampled to each prompt.")
    train_batch_size: Count = Field(
        default_factory=_batch_size,
        description="Samples of one update; by default 64, or all of the episode where those are fewer.",
    )
    micro_batch_tokens: Count | None = Field(
        None,
        description="Most tokens in one forward and backward pass, so that memory does not grow with the batch; null "
        "is 1,024 on a CPU (192 for a model of 50M parameters or more) and 16,384 on a GPU. Results agree.",
    )
    epochs_per_episode: Count = Field(1, description="Times the samples of an episode are trained on.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random in the run.")

    @property
    def samples_per_episode(self) -> int:
        """Answers (or dataset lines) of one episode."""
        return self.prompts_per_episode * self.samples_per_prompt

    @model_validator(mode="after")
    def _batch_fits(self) -> TrainConfig:
        if self.train_batch_size > self.samples_per_episode:
            raise ValueError(
                f"train_batch_size is {self.train_batch_size}, but an episode has only {self.samples_per_episode} "
                f"samples ({self.prompts_per_episode} prompts_per_episode x {self.samples_per_prompt} "
                "samples_per_prompt): lower train_batch_size or raise one of the two"
            )
        return self


class CheckpointConfig(Section):
    """When the run saves what a resume needs."""

    every_episodes: Count | None = Field(
        10, description="Save after every so many episodes; null only at the end or when interrupted."
    )
    keep: Count = Field(3, description="Newest checkpoints kept; older ones are removed.")
    best: str | None = Field(
        None,
        min_length=1,
        description="Metric, such as eval/score, by which the best checkpoint is kept, too; saved when it is found.",
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which value of that metric is the best.")


DEFAULT_LOGGER = "tensorboard"
"""The logger that is on, where it is installed, unless `logging` says otherwise."""


class LoggingConfig(Section):
    """The keys of `logging` that core reads; the others are names of loggers."""

    samples: Literal["all", "none"] | Annotated[StrictInt, Field(ge=1)] = Field(
        "all", description="Samples written to samples.jsonl: all, none, or at most so many an episode."
    )
    sample_tokens: bool = Field(
        False,
        description="Write the token ids of each sample, too: prompt_ids, completion_ids, and action_mask, which is "
        "true for the tokens that the policy chose.",
    )


class HooksConfig(Section):
    """The keys of `hooks` that core reads; the others are hook plugins with options, on where they are listed."""

    disable: list[str] = Field(default_factory=list, description="Names of hook plugins that stay off.")


class RunConfig(Section):
    """The sections of a run file that name no plugin, checked."""

    model: ModelConfig
    eval: EvalConfig | None = None
    reward_scaling: RewardScaling = Field(default_factory=RewardScaling)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    hooks: HooksConfig = Field(default_factory=HooksConfig)

    @model_validator(mode="after")
    def _best_is_measured(self) -> RunConfig:
        if (self.checkpoint.best or "").startswith("eval/") and self.eval is None:
            raise ValueError(f"checkpoint.best is {self.checkpoint.best}, but there is no eval section to measure it")
        return self
