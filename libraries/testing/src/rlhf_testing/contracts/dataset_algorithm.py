"""Contract of an algorithm that learns from the lines of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pydantic import BaseModel

from rlhf_core.algorithm import DatasetAlgorithm
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import DataError
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.types import SamplingParams

from ..benches import RECORDS, DatasetBench, LossBench, dataset_bench
from ..tiny import contract_tokenizer, perturb
from .losses import LossContract

if TYPE_CHECKING:
    pass


class DatasetAlgorithmContract(LossContract):
    """Tests of an algorithm that learns from a dataset of five lines. Override `records` if it reads other keys.

    Example:
        class TestMyAlgorithm(DatasetAlgorithmContract):
            plugin = "my-algorithm"
    """

    kind = "algorithms"
    records: ClassVar[Sequence[Mapping[str, Any]]] = RECORDS
    learning_rate: ClassVar[float] = 1e-3
    tolerance: ClassVar[float] = 1e-4
    """Tolerance of gradients, relative to the largest component."""

    @pytest.fixture
    @classmethod
    def bench(cls, selected: SelectedPlugin, config: BaseModel, rlhf_device: str) -> DatasetBench:
        tokenizer = contract_tokenizer()
        context = AlgorithmContext(SamplingParams(), 1, tokenizer)
        build = selected.build

        def make() -> DatasetAlgorithm[Any, Any]:
            algorithm = build(config, context)
            assert isinstance(algorithm, DatasetAlgorithm), (
                f"{selected.label}: build must return a DatasetAlgorithm, got a {type(algorithm).__name__}"
            )
            return algorithm

        return dataset_bench(make, cls.records, device=rlhf_device)

    def test_it_learns_from_a_dataset(self, selected: SelectedPlugin) -> None:
        assert selected.component.feeds == "dataset", f'{selected.label}: set feeds="dataset"'

    def test_items_know_their_length(self, bench: DatasetBench) -> None:
        for item in bench.prepared:
            assert isinstance(item.num_tokens, int) and item.num_tokens > 0, f"invalid num_tokens {item.num_tokens!r}"
        assert len(bench.algorithm.collate(bench.prepared)) == len(bench.prepared), "len(batch) must count its items"

    def test_a_wrong_line_is_an_error_that_says_so(self, bench: DatasetBench) -> None:
        with pytest.raises(DataError):
            bench.algorithm.encode({"prompt": "only a prompt"}, contract_tokenizer())

    def test_micro_batches_do_not_change_the_gradient(self, bench: LossBench) -> None:
        perturb(bench.models["policy"], seed=5, scale=0.01)  # away from the reference, at which DPO starts
        super().test_micro_batches_do_not_change_the_gradient(bench)

    def test_the_loss_falls(self, bench: DatasetBench) -> None:
        losses = bench.descend(bench.prepared, steps=10, lr=self.learning_rate)
        assert losses[-1] < losses[0], f"the loss must fall in ten steps on five lines, got {losses}"
