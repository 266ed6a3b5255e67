"""Estimates memory per role and process, throughput and time of a run, from shapes and a short measurement.

Memory counts weights, gradients, Adam's two moments and master weights, activations (Korthikanti 2022,
arXiv:2205.05198, section 4.1, without attention scores, which flash attention does not keep), logits and the
key-value cache. Time counts 2 N operations per token forward and 6 N per token trained on; generation is bound by
operations, by reading the weights once per token, or by kernel launches, whichever is slowest. Answers are assumed to
have the maximum length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.algorithm import Algorithm
from rlhf_core.batching import default_tokens
from rlhf_core.config import ResolvedRun
from rlhf_core.strategy import StateBytes

from .machine import Machine
from .shape import ModelShape

_FP32 = 4
_CALLS_PER_LAYER = 40
"""Kernel launches of a decoder layer for one token."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """Memory of one kind of process."""

    kind: str
    count: int
    bytes_by_part: dict[str, int]
    """`policy weights`, `critic optimizer`, `activations`, … -> bytes at the peak."""

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.bytes_by_part.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run does in one layout of its processes."""

    resolved: ResolvedRun
    algorithm: Algorithm[Any, Any]
    shape: ModelShape
    machine: Machine
    state: StateBytes
    """Bytes per parameter in a training process."""
    gathered_bytes: int
    """Of the policy, in a training process, while it computes with them."""
    weight_bytes: int
    """Bytes per parameter of a copy beside the trained model, in the type it is loaded in."""
    frozen: Mapping[str, tuple[int, float]]
    """Role of each frozen model besides the reference -> its parameters, and bytes of each."""
    copies_policy: bool
    """Whether an engine beside the trainer needs its own weights."""
    prompt_tokens: float
    answer_tokens: int
    trainers: int
    ranks: int
    """Shares of the rows; fewer than trainers where some compute the same rows together."""
    makers: int

    @property
    def critic_parameters(self) -> int:
        has_one = "critic" in self.algorithm.roles
        return self.shape.num_parameters - self.shape.head_parameters + self.shape.hidden_size if has_one else 0

    @property
    def reference_parameters(self) -> int:
        is_own = "reference" in self.algorithm.roles and self.resolved.run.model.lora is None
        return self.shape.num_parameters if is_own else 0

    @property
    def samples(self) -> float:
        """Samples of an episode per generating process."""
        return self.resolved.run.train.samples_per_episode / (self.makers or self.ranks)

    def processes(self, base: int) -> list[ProcessPlan]:
        training = {**self._trained("policy", self.shape.num_parameters, self.shape.num_trainable)}
        if self.critic_parameters:
            training |= self._trained("critic", self.critic_parameters, self.critic_parameters)
        if self.gathered_bytes:
            training["gathered weights"] = self.gathered_bytes
        training["activations"] = self._activations()
        making: dict[str, int] = {}
        if self.reference_parameters:
            each = self.weight_bytes if self.makers else self.state.reference
            making["reference weights"] = math.ceil(self.reference_parameters * each)
        for role, (size, each) in self.frozen.items():
            making[f"{role} weights"] = math.ceil(size * each)
        if self.answer_tokens:
            rows = min(self.samples, getattr(self.resolved.engine.config, "max_batch_size", self.samples))
            tokens = rows * (self.prompt_tokens + self.answer_tokens)
            making["key-value cache"] = int(tokens * self.shape.kv_values_per_token * _FP32)
        own = {"interpreter and libraries": base} if base else {}
        if not self.makers:
            if self.answer_tokens and self.copies_policy:
                making["policy copy of the engine"] = self.shape.num_parameters * self.weight_bytes
            return [ProcessPlan("process", self.trainers, {**training, **making, **own})]
        making["policy weights"] = self.shape.num_parameters * self.weight_bytes
        if self.critic_parameters:
            making["critic weights"] = self.critic_parameters * self.weight_bytes
        return [
            ProcessPlan("trainer", self.trainers, {**training, **own}),
            ProcessPlan("maker", self.makers, {**making, **own}),
        ]

    def seconds(self) -> dict[str, float]:
        """Seconds of an episode by phase."""
        tokens, machine = self._episode_tokens, self.machine
        trained = self.shape.num_parameters + self.critic_parameters
        factor = 8 if self.resolved.run.model.gradient_checkpointing else 6
        epochs = self.resolved.run.train.epochs_per_episode
        updates = epochs * math.ceil(
            self.resolved.run.train.samples_per_episode / self.resolved.run.train.train_batch_size
        )
        calls = 3 * self._forward_call_seconds * (2 if self.critic_parameters else 1)
        found = {"train": tokens * epochs * factor * trained / machine.flops / self.trainers + updates * calls}
        if self.answer_tokens:
            read = self.shape.num_parameters * _FP32 / machine.bytes_per_second
            compute = 2 * self.shape.num_parameters * self.samples / machine.flops
            found["rollout"] = self.answer_tokens * max(read, compute, self._forward_call_seconds)
            frozen = sum(size for size, _ in self.frozen.values())
            scoring = 2 * (self.reference_parameters + self.critic_parameters + frozen)
            found["scoring"] = tokens * scoring / machine.flops / (self.makers or self.trainers)
        return found

    def rates(self) -> dict[str, float]:
        seconds = self.seconds()
        rates = {"train": self._episode_tokens * self.resolved.run.train.epochs_per_episode / seconds["train"]}
        if "rollout" in seconds:
            answers = self.resolved.run.train.samples_per_episode * self.answer_tokens
            rates["rollout"] = answers / seconds["rollout"]
        return rates

    @property
    def _forward_call_seconds(self) -> float:
        return self.shape.num_layers * _CALLS_PER_LAYER * self.machine.seconds_per_call

    @property
    def _episode_tokens(self) -> float:
        return self.resolved.run.train.samples_per_episode * (self.prompt_tokens + self.answer_tokens)

    def _trained(self, role: str, parameters: int, trainable: int) -> dict[str, int]:
        state = self.state
        return {
            f"{role} weights": math.ceil(parameters * state.weights),
            f"{role} gradients": math.ceil(trainable * state.gradients),
            f"{role} optimizer": math.ceil(trainable * state.optimizer),
        }

    def _activations(self) -> int:
        """Activation bytes of one micro-batch of the largest trained model, with logits and their gradient."""
        train, shape = self.resolved.run.train, self.shape
        length = self.prompt_tokens + self.answer_tokens
        device = "cpu" if self.machine.device == "cpu" else "cuda"
        bound = train.micro_batch_tokens or default_tokens(device, shape.num_parameters)
        tokens = max(length, min(bound, math.ceil(train.train_batch_size / self.ranks) * length))
        per_layer = 8 * shape.hidden_size + 3 * shape.feed_forward_size
        if self.resolved.run.model.gradient_checkpointing:
            kept = shape.num_layers * shape.hidden_size + per_layer
        else:
            kept = shape.num_layers * per_layer
        return int(tokens * (self.state.activations * kept + 3 * shape.vocabulary) * _FP32)
