"""Estimates the memory of a run's processes by part, from the shapes of its models and the lengths of its prompts.

The parts are weights, gradients, Adam's two moments and master weights, activations (Korthikanti 2022,
arXiv:2205.05198, section 4.1, without attention scores, which flash attention does not keep), logits and the key-value
cache. Answers are assumed to have the maximum length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from rlhf_core import Columns
from rlhf_core.algorithm import Algorithm, FrozenModel, RolloutAlgorithm
from rlhf_core.config import ModelConfig, PromptsConfig, ResolvedRun, StrategyConfig
from rlhf_core.prompts import PromptStream
from rlhf_core.strategy import StateBytes
from rlhf_core.wiring import RunInputs, build_strategy, model_dtype
from rlhf_passes import MAX_SHARED_TOKENS, default_pass_tokens

from .inputs import InputCost
from .meta import meta_model
from .shape import model_shape

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_FP32 = 4
_NUM_INSPECTED_PROMPTS = 64
_ROUNDED = 0.6
"""Size of a layer's activations in 16-bit arithmetic, of that in float32: inputs of norms and sums stay float32."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """Memory of one kind of process."""

    kind: str
    count: int
    bytes_by_part: dict[str, int]
    """Peak bytes of each part: `policy weights`, `critic optimizer`, `activations`, …"""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.bytes_by_part.values())


class MemoryEstimate:
    """Estimates the memory of a run's processes, in the run's own layout or in others."""

    def __init__(self, resolved: ResolvedRun, inputs: RunInputs) -> None:
        """Read sizes of models and prompts. Loads only the weights of built-in models."""
        import torch

        self._algorithm = inputs.algorithm
        self._model = meta_model(resolved.run.model)
        self.shape = model_shape(resolved.run.model, self._model)
        device, has_gpu = resolved.run.model.device, torch.cuda.is_available()
        self.device = torch.device(("cuda" if has_gpu else "cpu") if device == "auto" else device).type
        self._lacks_gpu = self.device == "cuda" and not has_gpu
        self._prompt_tokens, self._answer_tokens, columns = _inspect(
            resolved, self._algorithm, inputs.prompts, inputs.tokenizer
        )
        self._inputs = InputCost.of(columns, self._model)
        frozen = self._algorithm.frozen_models if isinstance(self._algorithm, RolloutAlgorithm) else {}
        self._frozen = {
            role: (model_shape(ModelConfig(path=each.path)).num_parameters, each) for role, each in frozen.items()
        }
        # Interpreter and libraries, measured in this process, which has loaded them.
        self._library_bytes = 0 if self.device == "cuda" else psutil.Process().memory_info().rss

    @property
    def tokens_per_sample(self) -> float:
        """Mean length of the inspected prompts plus the maximum length of an answer."""
        return self._prompt_tokens + self._answer_tokens

    def processes(self, resolved: ResolvedRun, trainers: int) -> list[ProcessPlan]:
        """Estimate each kind of process.

        Args:
            resolved: the run, possibly with another strategy or other options of it.
            trainers: number of training processes.

        Raises:
            UserInputError: if the model does not allow the layout.
        """
        shape, algorithm = self.shape, self._algorithm
        strategy = build_strategy(_on_cpu(resolved) if self._lacks_gpu else resolved)
        strategy.check_model(self._model)
        dtype = model_dtype(resolved, strategy)
        state = strategy.state_bytes(trainers, dtype)
        share = resolved.optimizer.component.optimizer_bytes / StateBytes().optimizer
        state = state._replace(optimizer=state.optimizer * share)
        ranks = trainers // resolved.strategy.typed(StrategyConfig).processes_per_rank()
        makers = 0 if resolved.own_processes is None else resolved.own_processes.makers

        critic = shape.num_parameters - shape.head_parameters + shape.hidden_size if "critic" in algorithm.roles else 0
        training = self._trained_model("policy", shape.num_parameters, shape.num_trainable, state)
        if critic:
            training |= self._trained_model("critic", critic, self._trained_critic(resolved, critic), state)
        if largest := shape.quantized.largest:
            training["dequantized layer"] = 2 * largest * _FP32
        if gathered := strategy.gathered_bytes(self._model):
            training["gathered weights"] = gathered
        is_rounded = getattr(strategy, "precision", "fp32") != "fp32"
        if self.device == "cpu" and is_rounded and state.weights == _FP32 and not strategy.shards_parameters:
            plain = shape.num_parameters - shape.quantized.num_parameters
            training["weights in 16 bits"] = 2 * plain  # copies for the passes of an update
        training["activations"] = self._activations(resolved, state, ranks, is_rounded, with_critic=bool(critic))

        making: dict[str, int] = {}
        if self._inputs.stored_bytes:  # of an episode's prompts, and of the held-out ones for the whole run
            num_prompts = math.ceil(resolved.run.train.prompts_per_episode / (makers or ranks))
            num_prompts += sum(options.num_prompts for _, options in resolved.evaluation_sets)
            making["images of prompts"] = math.ceil(self._inputs.stored_bytes * num_prompts)
        untrained_bytes = dtype.itemsize if makers else state.reference
        if "reference" in algorithm.roles and resolved.run.model.lora is None:
            making["reference weights"] = math.ceil(shape.num_parameters * untrained_bytes)
        for role, (size, model) in self._frozen.items():
            making[f"{role} weights"] = math.ceil(size * _bytes_of(model, untrained_bytes))
        if self._answer_tokens and not getattr(resolved.engine.config, "is_remote", False):
            samples = resolved.run.train.samples_per_episode / (makers or ranks)
            rows = min(samples, getattr(resolved.engine.config, "max_batch_size", samples))
            making["key-value cache"] = int(rows * self.tokens_per_sample * shape.kv_values_per_token * _FP32)
        libraries = {"interpreter and libraries": self._library_bytes} if self._library_bytes else {}
        if not makers:
            if self._answer_tokens and strategy.shards_parameters:
                making["policy copy of the engine"] = shape.num_parameters * dtype.itemsize
            parts = self._with_loading({**training, **making}, dtype)
            return [ProcessPlan("process", trainers, {**parts, **libraries})]
        making["policy weights"] = self._weight_bytes(shape.num_parameters, dtype.itemsize)
        if critic:
            making["critic weights"] = self._weight_bytes(critic, dtype.itemsize)
        return [
            ProcessPlan("trainer", trainers, {**self._with_loading(training, dtype), **libraries}),
            ProcessPlan("maker", makers, {**self._with_loading(making, dtype), **libraries}),
        ]

    def _trained_model(self, role: str, parameters: int, trainable: int, state: StateBytes) -> dict[str, int]:
        return {
            f"{role} weights": self._weight_bytes(parameters, state.weights),
            f"{role} gradients": math.ceil(trainable * state.gradients),
            f"{role} optimizer": math.ceil(trainable * state.optimizer),
        }

    def _weight_bytes(self, parameters: int, each: float) -> int:
        """Bytes of the weights of the policy or its critic, whose trunks are quantized alike."""
        quantized = self.shape.quantized
        return math.ceil((parameters - quantized.num_parameters) * each) + quantized.num_bytes

    def _with_loading(self, parts: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
        """Add the memory of the file's pages and the full weights before quantization, as far as it exceeds `parts`."""
        loading = 2 * self.shape.num_parameters * dtype.itemsize - sum(parts.values())
        if self.device == "cuda" or not self.shape.quantized.num_parameters or loading <= 0:
            return parts
        return {**parts, "loading before quantization": loading}

    def _trained_critic(self, resolved: ResolvedRun, critic: int) -> int:
        """Number of trained parameters of a critic: all, or an adapter like the policy's and the value head."""
        return critic if resolved.run.model.lora is None else self.shape.num_trainable + self.shape.hidden_size

    def _activations(
        self, resolved: ResolvedRun, state: StateBytes, ranks: int, is_rounded: bool, *, with_critic: bool
    ) -> int:
        """Bytes of activations of one micro-batch of the trained models, with logits and their gradient.

        On a CPU, where large models keep fewer tensors (`rlhf_passes`), one model and float32 are assumed.

        Args:
            resolved: the run.
            state: bytes per parameter and of activations in this layout.
            ranks: number of shares of the rows. It is below the number of training processes if several of them compute
                the same rows together.
            is_rounded: whether the arithmetic is 16-bit.
            with_critic: whether a critic is trained in the same pass.
        """
        import torch

        train, shape, length = resolved.run.train, self.shape, self.tokens_per_sample
        dtype = torch.bfloat16 if is_rounded else None
        bound = train.micro_batch_tokens or default_pass_tokens(self.device, shape.num_parameters, dtype)
        tokens = max(length, min(bound, math.ceil(train.train_batch_size / ranks) * length))
        answers = min(train.samples_per_prompt, math.ceil(train.train_batch_size / ranks))
        if train.micro_batch_tokens is None and answers > 1:  # answers to one prompt share a pass
            tokens = max(tokens, min(MAX_SHARED_TOKENS, self._prompt_tokens + answers * self._answer_tokens))
        per_layer = 8 * shape.hidden_size + 3 * shape.feed_forward_size
        if resolved.run.model.gradient_checkpointing:
            kept: float = shape.num_layers * shape.hidden_size + per_layer
        else:
            kept = shape.num_layers * per_layer
        kept *= state.activations
        if self.device == "cuda":
            kept *= (1 + with_critic) * (_ROUNDED if is_rounded else 1.0)
        rows = max(1.0, tokens / length)
        images = rows * (self._inputs.read_bytes + self._inputs.kept_bytes * state.activations)
        return int(tokens * (kept + 3 * shape.vocabulary) * _FP32 + images)


def _bytes_of(frozen: FrozenModel, default: float) -> float:
    """Bytes per parameter of a frozen model, `default` if it has the run's dtype."""
    import torch

    return default if frozen.dtype == "auto" else float(getattr(torch, frozen.dtype).itemsize)


def _on_cpu(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with the device `cpu` and a GPU's precision, to plan for GPUs on a machine without one."""
    config = resolved.strategy.config
    if getattr(config, "precision", None) == "auto":
        config = config.model_copy(update={"precision": "bf16"})
    model = resolved.run.model.model_copy(update={"device": "cpu"})
    run = resolved.run.model_copy(update={"model": model})
    return replace(resolved, run=run, strategy=replace(resolved.strategy, config=config))


def _inspect(
    resolved: ResolvedRun, algorithm: Algorithm[Any, Any], prompts: PromptStream, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, int, list[Columns]]:
    """Mean number of tokens of the first prompts (or records), maximum number of tokens of an answer, and columns."""
    positions = range(_NUM_INSPECTED_PROMPTS)
    if isinstance(algorithm, RolloutAlgorithm):
        read = [prompts.prompt(position) for position in positions]
        mean = sum(len(each.prompt_ids) for each in read) / len(read)
        return mean, resolved.sampling.max_new_tokens, [each.columns for each in read]
    encode: Any = getattr(algorithm, "encode")  # noqa: B009  # a method of DatasetAlgorithm
    items = [item for position in positions if (item := encode(prompts.record(position), tokenizer)) is not None]
    columns = [getattr(item, "columns", Columns()) for item in items]
    if not items:
        return float(resolved.prompts.typed(PromptsConfig).max_prompt_tokens), 0, columns
    return sum(item.num_tokens for item in items) / len(items), 0, columns
