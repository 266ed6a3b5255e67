"""Contract of a strategy: it trains like plain torch, however it wraps or shards the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.plugins.selected import SelectedPlugin

from ..strategy_suite import StrategyCase, observe, run_strategies
from ..tiny_training import MAX_GRAD_NORM, SHARD_BYTES, change_cosine, largest_difference, tiny_model, train_alone
from .base import ComponentContract

_SPLITS = ("whole", "accumulated", "ragged", "two_forwards", "checkpointing")
_SAME_DIRECTION = 0.95


class StrategyContract(ComponentContract):
    """Tests of a strategy: a small training in one or several processes, compared with AdamW in plain torch.

    Example:
        class TestMyStrategy(StrategyContract):
            plugin = "my-strategy"
            num_processes = 2
    """

    kind = "strategies"
    num_processes: ClassVar[int] = 1
    """Number of training processes. Several are started with gloo."""
    exact: ClassVar[bool] = True
    """Whether the arithmetic is float32. A strategy that rounds to 16 bits gets looser bounds, like all on a GPU."""

    @pytest.fixture(autouse=True)
    def bounds(self, rlhf_device: str) -> None:
        """Choose between exact and looser bounds. On a GPU arithmetic is bfloat16 unless options change that."""
        self._is_exact = self.exact and rlhf_device == "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def seen(cls, selected: SelectedPlugin, given: dict[str, Any], rlhf_device: str, folder: Path) -> dict[str, Any]:
        """The observed results (see `strategy_suite.observe`)."""
        case = StrategyCase("it", cls.plugin, given, rlhf_device)
        if cls.num_processes > 1:
            return run_strategies([case], cls.num_processes, folder)[case.name]
        strategy = case.make()
        strategy.setup()
        try:
            return observe(strategy, folder)
        finally:
            strategy.teardown()

    def test_it_trains_as_plain_torch(self, seen: dict[str, Any]) -> None:
        """Whole, accumulated, over ranks with unequal shares, in several forwards, and with gradient checkpointing."""
        alone = train_alone(updates=3)
        for split in _SPLITS:
            if split in seen:
                self._check(seen[split], alone, split)

    def test_clipping_is_optional_and_the_norm_is_that_before_it(self, seen: dict[str, Any]) -> None:
        self._check(seen["unclipped"], train_alone(updates=2, max_grad_norm=None), "unclipped")
        assert max(seen["whole"]["norms"]) > MAX_GRAD_NORM, "step() must return the norm before clipping"

    def test_lora_trains_adapters_only(self, seen: dict[str, Any]) -> None:
        alone = train_alone(updates=2, lora=True)
        # In bfloat16, the second update's adapter gradients are 5% off even in plain torch.
        rounded = alone if self._is_exact else train_alone(updates=2, lora=True, dtype="bfloat16")
        self._check_numbers(seen["lora"], alone, "lora", rounded)
        start, weights = tiny_model(lora=True).state_dict(), seen["lora"]["weights"]
        for name, tensor in weights.items():
            if "lora_" in name:
                assert not tensor.equal(start[name]), f"adapter weight {name} was not trained"
            else:
                assert tensor.equal(start[name].to(tensor.dtype)), f"frozen weight {name} moved"

    def test_shards_are_whole_named_and_bounded(self, seen: dict[str, Any]) -> None:
        """`state_dict_shards` yields every tensor once, including tied ones, under the unwrapped model's names."""
        shards, start = seen["shards"], tiny_model().state_dict()
        assert shards["state_dict"] == list(start), "unwrap(model).state_dict() must have the model's own names"
        assert shards["names"] == [name for name in start if name != "lm_head.weight"], "yield a tied tensor once"
        too_large = [(count, size) for count, size in shards["sizes"] if size > SHARD_BYTES and count > 1]
        assert not too_large, f"shards over {SHARD_BYTES} bytes with several tensors: {too_large}"
        assert shards["only"] == [name for name in start if "norm" in name], "`only` is ignored"
        assert largest_difference(shards["weights"], start) == 0.0, "gathered weights differ from the model's"

    def test_it_resumes_exactly(self, seen: dict[str, Any]) -> None:
        resumed = seen["resumed"]
        assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0, "loaded weights differ from saved ones"
        for key in ("losses", "norms"):
            assert resumed["resumed"][key] == resumed["uninterrupted"][key], f"{key} differ after a resume"
        difference = largest_difference(resumed["resumed"]["weights"], resumed["uninterrupted"]["weights"])
        assert difference == 0.0, f"weights differ by {difference:.3g} after a resume"

    def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(self, seen: dict[str, Any]) -> None:
        diverged = seen["diverged"]
        assert all(diverged["refused"]), f"all ranks must raise DivergenceError, got {diverged['refused']}"
        assert largest_difference(diverged["before"], diverged["after"]) == 0.0, "the rejected step changed weights"
        assert math.isfinite(diverged["next_loss"]), "the update after a rejected step must work"

    def test_dropped_gradients_leave_no_trace(self, seen: dict[str, Any]) -> None:
        """An update without counted samples calls `drop_gradients` instead of a step."""
        dropped = seen["dropped"]
        assert largest_difference(dropped["before"], dropped["after"]) == 0.0, "dropping gradients changed weights"
        difference = largest_difference(dropped["weights"], seen["accumulated"]["weights"])
        assert difference < 1e-6, f"dropped gradients changed later updates by {difference:.3g}"

    def _check_numbers(
        self, got: Mapping[str, Any], alone: Mapping[str, Any], name: str, rounded: Mapping[str, Any] | None = None
    ) -> None:
        """Compare losses and norms. `rounded` is `alone` in 16 bits, whose error of the norm is the tolerance."""
        loss, norm = (1e-5, 1e-5) if self._is_exact else (2e-3, 2e-2)
        assert got["losses"] == pytest.approx(alone["losses"], rel=loss, abs=loss), f"{name}: wrong losses"
        near = (alone if rounded is None else rounded)["norms"]
        bounds = [max(loss, abs(one - other)) for one, other in zip(alone["norms"], near, strict=True)]
        expected = [pytest.approx(one, rel=norm, abs=bound) for one, bound in zip(alone["norms"], bounds, strict=True)]
        assert got["norms"] == expected, f"{name}: wrong gradient norms"

    def _check(self, got: Mapping[str, Any], alone: Mapping[str, Any], name: str) -> None:
        self._check_numbers(got, alone, name)
        if self._is_exact:
            assert largest_difference(got["weights"], alone["weights"]) < 1e-5, f"{name}: wrong weights"
        else:
            cosine = change_cosine(tiny_model().state_dict(), got["weights"], alone["weights"])
            assert cosine > _SAME_DIRECTION, f"{name}: weights moved in another direction (cosine {cosine:.3f})"
