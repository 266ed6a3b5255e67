"""Test benches: algorithms with tiny models and prepared training items."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithm import Algorithm, DatasetAlgorithm, LossOutput, RolloutAlgorithm
from rlhf_core.place import LocalPlace
from rlhf_core.types import BufferItem, Experience, RolloutGroup

from .samples import rollout_of
from .tiny import EOS_ID, NUM_SPECIAL, contract_policy, contract_tokenizer, perturb

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

NUM_PROMPTS = 3

RECORDS: Sequence[Mapping[str, Any]] = [
    {
        "prompt": prompt,
        "completion": good,
        "chosen": good,
        "rejected": bad,
        "steps": [good, bad],
        "labels": [True, False],
    }
    for prompt, good, bad in (
        ("one and one =", " two", " three, or so"),
        ("2 + 2 =", " 4", " 5"),
        ("say a", " a", " no"),
        ("the end?", " the end.", " why"),
        ("x", " yes!", " zzz"),
    )
]
"""Records for supervised fine-tuning, preferences and labeled steps."""


def trained_models(algorithm: Algorithm[Any, Any], policy: nn.Module, device: str) -> dict[str, nn.Module]:
    """Models that the trainer passes to `loss`."""
    models = {"policy": policy.to(device)}
    if "critic" in algorithm.roles:
        models["critic"] = algorithm.build_critic(policy).to(device)
    return models


@dataclass
class LossBench(ABC):
    """An algorithm with its models, and the trainer's objective: each term's sum over all batches, over its count."""

    make: Callable[[], Algorithm[Any, Any]]
    algorithm: Algorithm[Any, Any]
    models: dict[str, nn.Module]
    device: torch.device

    @abstractmethod
    def items(self) -> Sequence[Any]:
        """Return at least five items, ready for updates."""

    def output(self, items: Sequence[Any]) -> LossOutput:
        from rlhf_core.batching import to_device

        batch = to_device(self.algorithm.collate(items), self.device)
        return self.algorithm.loss(self.models, batch)

    def counts(self, items: Sequence[Any]) -> dict[str, float]:
        return dict(self.algorithm.counts(self.algorithm.collate(items)))

    def total(self, batches: Sequence[Sequence[Any]]) -> Tensor:
        """Loss over all batches together, with gradient."""
        import torch

        counts = [self.counts(batch) for batch in batches]
        outputs = [self.output(batch) for batch in batches]
        total = torch.zeros((), device=self.device)
        for name, term in self.algorithm.terms.items():
            divisor = max(math.fsum(count[name] for count in counts), 1.0)
            total = total + sum(term.coefficient * output.sums[name] / divisor for output in outputs)
        return total

    def gradient(self, batches: Sequence[Sequence[Any]]) -> Tensor:
        """Gradient of all trained parameters as one vector, 0 for unused parameters."""
        import torch

        parameters = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(self.total(batches), parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    def descend(self, items: Sequence[Any], *, steps: int, lr: float) -> list[float]:
        """Train on one batch. Return the loss before each step and after the last."""
        import torch

        optimizer = torch.optim.Adam([p for model in self.models.values() for p in model.parameters()], lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.total([items])
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            losses.append(float(self.total([items])))
        return losses


@dataclass
class RolloutBench(LossBench):
    """An episode in which half of each prompt's answers have score 1 and half have score 0."""

    make: Callable[[], RolloutAlgorithm]
    algorithm: RolloutAlgorithm
    episode: Experience

    def advantages(self) -> Experience:
        return self.algorithm.advantages(self.episode)

    def items(self) -> list[BufferItem]:
        from rlhf_core.batching import split

        return split(self.advantages())

    def log_probs(self) -> Tensor:
        """Log-prob of each whole answer under the current policy, [B]."""
        import torch

        from rlhf_core.batching import to_device
        from rlhf_forward.forward import policy_forward

        with torch.no_grad():
            batch = to_device(self.episode, self.device)
            return policy_forward(self.models["policy"], batch, 1.0).log_probs.sum(-1).cpu()


@dataclass
class DatasetBench(LossBench):
    """An algorithm that learns from a dataset, with its encoded lines."""

    make: Callable[[], DatasetAlgorithm[Any, Any]]
    algorithm: DatasetAlgorithm[Any, Any]
    prepared: Sequence[Any]

    def items(self) -> Sequence[Any]:
        return self.prepared


def rollout_bench(make: Callable[[], RolloutAlgorithm], *, samples_per_prompt: int, device: str) -> RolloutBench:
    """Build the algorithm with its models and an episode of random answers."""
    import torch

    algorithm = make()
    models = trained_models(algorithm, contract_policy(), device)
    episode = _episode(algorithm, models, samples_per_prompt, device)
    return RolloutBench(make, algorithm, models, torch.device(device), episode)


def dataset_bench(
    make: Callable[[], DatasetAlgorithm[Any, Any]], records: Sequence[Mapping[str, Any]], *, device: str
) -> DatasetBench:
    """Build the algorithm with its models, and encode and prepare `records`. Wrong records raise `DataError`."""
    import torch

    from rlhf_core.batching import to_device

    algorithm, tokenizer, place = make(), contract_tokenizer(), torch.device(device)
    models = trained_models(algorithm, _policy(algorithm), device)
    encoded = [algorithm.encode(record, tokenizer) for record in records]
    assert all(item is not None for item in encoded), "encode() returned None (too long) for a short record"
    initial = copy.deepcopy(models["policy"]).eval().requires_grad_(False)

    def reference(items: Sequence[Any]) -> list[Tensor]:
        batch = to_device(algorithm.collate(items), place)
        with torch.no_grad():
            return list(algorithm.reference_forward(initial, batch).cpu())

    items = algorithm.prepare_items(encoded, reference)
    assert len(items) == len(encoded), "prepare_items must return every item, in order"
    return DatasetBench(make, algorithm, models, place, items)


def _episode(algorithm: RolloutAlgorithm, models: dict[str, nn.Module], per_prompt: int, device: str) -> Experience:
    """Random answers with the log-probs, values and reference log-probs they would have in a run."""
    import torch

    from rlhf_core.batching import collate, to_device
    from rlhf_core.models.passes import GroupPasses
    from rlhf_forward.forward import policy_forward

    place, by_role = LocalPlace(torch.device(device), torch.float32), dict(models)
    for seed, role in enumerate(sorted(algorithm.roles - models.keys()), start=4):
        by_role[role] = copy.deepcopy(models["policy"])
        perturb(by_role[role], seed=seed, scale=0.01)
    drawn = tuple(_random_items(per_prompt))
    group = RolloutGroup(position=0, rollouts=tuple(map(rollout_of, drawn)), items=drawn)
    items = GroupPasses(place, by_role, algorithm.passes).run([group])[0].items
    batch = to_device(collate(items), torch.device(device))
    with torch.no_grad():
        values: dict[str, Any] = {"action_log_probs": policy_forward(models["policy"], batch, 1.0).log_probs}
    if algorithm.needs_trainer_log_probs:
        values["trainer_log_probs"] = values["action_log_probs"]
    on_cpu = to_device(replace(batch, **values), torch.device("cpu"))
    return replace(on_cpu, scores=on_cpu.rewards["it"].clone())


def _random_items(per_prompt: int) -> list[BufferItem]:
    import torch

    generator = torch.Generator().manual_seed(3)
    items = []
    for sample_id in range(NUM_PROMPTS * per_prompt):
        group, k = divmod(sample_id, per_prompt)
        length = 2 + (sample_id * 3 + k) % 5
        answer = torch.randint(NUM_SPECIAL, NUM_SPECIAL + 40, (length,), generator=generator)
        truncated = k == 1
        if not truncated:
            answer[-1] = EOS_ID
        items.append(
            BufferItem(
                sample_id=sample_id,
                group_id=group,
                policy_version=0,
                prompt_ids=torch.arange(NUM_SPECIAL + group, NUM_SPECIAL + 2 * group + 3),
                response_ids=answer,
                action_mask=torch.ones(length, dtype=torch.bool),
                action_log_probs=torch.zeros(length),
                rewards={"it": float(k % 2 == 0)},
                truncated=truncated,
            )
        )
    return items


def _policy(algorithm: DatasetAlgorithm[Any, Any]) -> nn.Module:
    """The tiny model of the kind that the algorithm trains: a language model or a score model."""
    from rlhf_models.classifier import as_score_model

    model = contract_policy()
    return model if algorithm.model_kind == "causal-lm" else as_score_model(model, contract_tokenizer())
