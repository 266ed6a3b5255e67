"""The contract of an algorithm that learns from the lines of a dataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pydantic import BaseModel

from ...algorithm import DatasetAlgorithm
from ...contexts import algorithm_context
from ...errors import DataError
from ...plugins.discovery import Selected, resolve_build
from ...types import SamplingParams
from .losses import LossBench, LossContract, trained_models
from .tiny import contract_policy, contract_tokenizer, perturb

if TYPE_CHECKING:
    from torch import Tensor, nn

RECORDS: Sequence[Mapping[str, Any]] = [
    {"prompt": "one and one =", "completion": " two", "chosen": " two", "rejected": " three, or so"},
    {"prompt": "2 + 2 =", "completion": " 4", "chosen": " 4", "rejected": " 5"},
    {"prompt": "say a", "completion": " a", "chosen": " a", "rejected": " no"},
    {"prompt": "the end?", "completion": " the end.", "chosen": " the end.", "rejected": " why"},
    {"prompt": "x", "completion": " yes!", "chosen": " yes!", "rejected": " zzz"},
]
"""Lines that suit supervised fine-tuning and learning from preferences alike."""


@dataclass
class DatasetBench(LossBench):
    """The lines as items."""

    make: Callable[[], DatasetAlgorithm[Any, Any]]
    algorithm: DatasetAlgorithm[Any, Any]
    prepared: Sequence[Any]

    def items(self) -> Sequence[Any]:
        return self.prepared


class DatasetAlgorithmContract(LossContract):
    """Five lines; override `records` where the algorithm reads other keys."""

    kind = "algorithms"
    records: ClassVar[Sequence[Mapping[str, Any]]] = RECORDS
    learning_rate: ClassVar[float] = 1e-3
    tolerance: ClassVar[float] = 1e-4
    """Tolerance of gradients, relative to the largest."""

    @pytest.fixture
    @classmethod
    def bench(cls, selected: Selected, config: BaseModel, rlhf_device: str) -> DatasetBench:
        import torch

        tokenizer, device = contract_tokenizer(), torch.device(rlhf_device)
        context = algorithm_context(tokenizer, sampling=SamplingParams(), samples_per_prompt=1, weights={})
        build = resolve_build(selected)

        def make() -> DatasetAlgorithm[Any, Any]:
            algorithm = build(config, context)
            assert isinstance(algorithm, DatasetAlgorithm), (
                f"{selected.label}: build returns a {type(algorithm).__name__}, not a DatasetAlgorithm"
            )
            return algorithm

        algorithm = make()
        models = trained_models(algorithm, _policy(algorithm), rlhf_device)
        encoded = [algorithm.encode(record, tokenizer) for record in cls.records]
        assert all(item is not None for item in encoded), "short lines are left out as too long"
        start = copy.deepcopy(models["policy"]).eval().requires_grad_(False)

        def reference(items: Sequence[Any]) -> list[Tensor]:
            batch = algorithm.to_device(algorithm.collate(items), device)
            with torch.no_grad():
                return list(algorithm.reference_forward(start, batch).cpu())

        items = algorithm.prepare_items(encoded, reference)
        assert len(items) == len(encoded), "prepare_items keeps every item, in order"
        return DatasetBench(make, algorithm, models, device, items)

    def test_it_learns_from_a_dataset(self, selected: Selected) -> None:
        assert selected.component.feeds == "dataset", f'{selected.label}: say feeds="dataset"'

    def test_items_know_their_length(self, bench: DatasetBench) -> None:
        for item in bench.prepared:
            assert isinstance(item.num_tokens, int) and item.num_tokens > 0, f"num_tokens is {item.num_tokens!r}"
        assert len(bench.algorithm.collate(bench.prepared)) == len(bench.prepared), "a batch is as long as its items"

    def test_a_wrong_line_is_an_error_that_says_so(self, bench: DatasetBench) -> None:
        with pytest.raises(DataError):
            bench.algorithm.encode({"prompt": "only a prompt"}, contract_tokenizer())

    def test_micro_batches_do_not_change_the_gradient(self, bench: LossBench) -> None:
        perturb(bench.models["policy"], seed=5, scale=0.01)  # away from the reference, where DPO has it
        super().test_micro_batches_do_not_change_the_gradient(bench)

    def test_the_loss_falls(self, bench: DatasetBench) -> None:
        losses = bench.descend(bench.prepared, steps=10, lr=self.learning_rate)
        assert losses[-1] < losses[0], f"ten steps on five lines and the loss does not fall: {losses}"


def _policy(algorithm: DatasetAlgorithm[Any, Any]) -> nn.Module:
    """The tiny model in the kind that the algorithm trains: a language model or a score model."""
    from ...models.classifier import as_score_model

    model = contract_policy()
    return model if algorithm.model_kind == "causal-lm" else as_score_model(model, contract_tokenizer())
