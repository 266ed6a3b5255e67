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
from .base import ComponentContract
from .losses import Objective, check_masked, check_output, check_split, check_state, check_terms, trained_models
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
class DatasetBench:
    """An algorithm, its models, and its items."""

    make: Callable[[], DatasetAlgorithm[Any, Any]]
    algorithm: DatasetAlgorithm[Any, Any]
    models: dict[str, nn.Module]
    items: Sequence[Any]
    device: str

    @property
    def objective(self) -> Objective:
        return Objective(self.algorithm, self.models, self.device)


class DatasetAlgorithmContract(ComponentContract):
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

        tokenizer = contract_tokenizer()
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
            batch = algorithm.to_device(algorithm.collate(items), torch.device(rlhf_device))
            with torch.no_grad():
                return list(algorithm.reference_forward(start, batch).cpu())

        items = algorithm.prepare_items(encoded, reference)
        assert len(items) == len(encoded), "prepare_items keeps every item, in order"
        return DatasetBench(make, algorithm, models, items, rlhf_device)

    def test_it_learns_from_a_dataset(self, selected: Selected) -> None:
        assert selected.component.feeds == "dataset", f'{selected.label}: say feeds="dataset"'

    def test_terms_train_its_roles(self, bench: DatasetBench) -> None:
        check_terms(bench.algorithm)

    def test_items_know_their_length(self, bench: DatasetBench) -> None:
        for item in bench.items:
            assert isinstance(item.num_tokens, int) and item.num_tokens > 0, f"num_tokens is {item.num_tokens!r}"
        assert len(bench.algorithm.collate(bench.items)) == len(bench.items), "a batch is as long as its items"

    def test_a_wrong_line_is_an_error_that_says_so(self, bench: DatasetBench) -> None:
        with pytest.raises(DataError):
            bench.algorithm.encode({"prompt": "only a prompt"}, contract_tokenizer())

    def test_loss_is_sums_and_counts(self, bench: DatasetBench) -> None:
        check_output(bench.algorithm, bench.objective, bench.items)

    def test_micro_batches_do_not_change_the_gradient(self, bench: DatasetBench) -> None:
        perturb(bench.models["policy"], seed=5, scale=0.01)  # away from the reference, where DPO has it
        check_split(bench.objective, bench.items, tolerance=self.tolerance)

    def test_a_masked_item_adds_nothing(self, bench: DatasetBench) -> None:
        """A rank with less work runs one to stay in step."""
        check_masked(bench.algorithm, bench.objective, bench.items, self.tolerance)

    def test_the_loss_falls(self, bench: DatasetBench) -> None:
        losses = bench.objective.descend(bench.items, steps=10, lr=self.learning_rate)
        assert losses[-1] < losses[0], f"ten steps on five lines and the loss does not fall: {losses}"

    def test_state_survives_a_checkpoint(self, bench: DatasetBench) -> None:
        bench.algorithm.end_episode()
        check_state(bench.make, bench.algorithm)


def _policy(algorithm: DatasetAlgorithm[Any, Any]) -> nn.Module:
    """The tiny model in the kind that the algorithm trains: a language model or a score model."""
    from ...models.classifier import as_score_model

    model = contract_policy()
    return model if algorithm.model_kind == "causal-lm" else as_score_model(model, contract_tokenizer())
