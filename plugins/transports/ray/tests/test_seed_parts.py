"""The parts of the seed's classes that need no Ray."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import PATIENCE_SECONDS
from torch import nn

from rlhf_core.columns import ENGINE_COLUMNS, TEMPERATURE, Columns
from rlhf_core.errors import DataError, RlhfError, SyncError
from rlhf_core.types import BufferItem, Experience, RolloutGroup
from rlhf_ray.detached_trainer import DetachedTrainer, FitPlan
from rlhf_ray.maker_feed import distribute, maker_number, sample_id
from rlhf_ray.maker_parts import _TemperatureColumn, trained_names
from rlhf_ray.maker_presence import MakerPresence
from rlhf_ray.wire import num_bytes, pack, unpack


def test_what_is_trained_beside_a_frozen_rest_has_names() -> None:
    module = nn.Linear(2, 2)
    assert trained_names(module) == frozenset()
    module.weight.requires_grad_(False)
    assert trained_names(module) == {"bias"}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ")  # as `set_up_process` has it in an actor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_come_back_from_arrays(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0], [2.0, -3.0]]).to(dtype)
    packed = pack({"w": tensor, "transposed": tensor.T, "scalar": tensor[0, 1]})
    for each in packed.values():
        each.array.flags.writeable = False
    back = unpack(packed)
    assert torch.equal(back["w"], tensor)
    assert torch.equal(back["transposed"], tensor.T)
    assert torch.equal(back["scalar"], tensor[0, 1])
    assert num_bytes(packed) == 9 * tensor.element_size()


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=10),
    st.integers(1, 4),
)
def test_items_are_dealt_in_turn(sizes: list[int], num_targets: int) -> None:
    received: list[list[int]] = [[] for _ in range(num_targets)]
    first = made = 0
    for size in sizes:
        dealt, first = distribute(list(range(made, made + size)), num_targets, first)
        made += size
        for target, part in enumerate(dealt):
            received[target].extend(part)
    assert received == [list(range(target, made, num_targets)) for target in range(num_targets)]


def test_a_token_keeps_the_temperature_that_its_engine_reported() -> None:
    ids, mask = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    plain = BufferItem(
        sample_id=0,
        group_id=0,
        policy_version=0,
        prompt_ids=ids,
        response_ids=ids,
        action_mask=mask,
        action_log_probs=torch.zeros(2),
    )
    told = replace(plain, columns=Columns({TEMPERATURE: [1.5, 0.0]}, ENGINE_COLUMNS))
    rows = _TemperatureColumn(0.5).run([RolloutGroup(position=0, rollouts=(), items=(plain, told))])
    assert [row[TEMPERATURE] for row in rows] == [[0.5, 0.5], [1.5, 0.5]]


def test_a_run_starts_the_class_that_is_used_by_hand() -> None:
    import rlhf_ray
    from rlhf_ray import actors

    assert actors.ExperienceMakerHolder is rlhf_ray.ExperienceMakerHolder


class TestNumbers:
    @given(st.integers(0, (1 << 22) - 1), st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 16) - 1))
    def test_numbers_are_unique_and_fit(self, maker: int, step: int, row: int) -> None:
        number = sample_id(maker, step, row)
        assert 0 <= number < 1 << 62
        assert (number >> 40, number >> 16 & (1 << 24) - 1, number & (1 << 16) - 1) == (maker, step, row)

    def test_makers_have_numbers_of_their_own(self) -> None:
        assert len({maker_number(f"maker_{i}") for i in range(64)}) == 64

    def test_what_cannot_be_numbered_is_refused(self) -> None:
        with pytest.raises(DataError, match="cannot number"):
            sample_id(0, 0, 1 << 16)
        with pytest.raises(DataError, match="cannot number"):
            sample_id(0, 1 << 24, 0)


def experience(number: int) -> Experience:
    return Experience(
        sequences=torch.full((1, 2), number),
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        action_mask=torch.ones(1, 1, dtype=torch.bool),
        action_log_probs=torch.zeros(1, 1),
        sample_ids=torch.tensor([number]),
        group_ids=torch.tensor([number]),
        policy_versions=torch.tensor([0]),
        truncated=torch.tensor([False]),
    )


class Fit(DetachedTrainer):
    """Of `plan`, with batches from `draw`."""

    def __init__(self, plan: FitPlan, draw: Callable[[], Experience | str]) -> None:
        super().__init__([])
        self._plan = plan
        self._draw = draw  # type: ignore[method-assign]

    def training_step(self, experience: Experience) -> dict[str, Any]:
        raise NotImplementedError

    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        raise NotImplementedError


class TestFit:
    def test_later_passes_shuffle_the_same_batches(self) -> None:
        numbers = iter(range(100))
        trainer = Fit(FitPlan(10, 4, 3), lambda: experience(next(numbers)))
        seen = []
        for index in range(3):
            passes = [[int(b.sample_ids) for b in batches] for batches in trainer.batches(index).epochs]
            assert [sorted(batches) for batches in passes] == [passes[0]] * 3
            seen += passes[0]
        assert seen == list(range(10))

    def test_a_shortfall_says_how_far_it_came_and_why(self) -> None:
        outcomes = iter([experience(0), "maker_0 is done"])
        trainer = Fit(FitPlan(4, 4, 1), lambda: next(outcomes))
        with pytest.raises(RlhfError, match="after 1 of 4 batches: maker_0 is done"):
            [list(batches) for batches in trainer.batches(0).epochs]

    @pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
    def test_a_fit_has_steps(self, wrong: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            FitPlan(*wrong)


class TestPresence:
    @pytest.fixture(autouse=True)
    def short_grace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlhf_ray.maker_presence._GRACE_SECONDS", 0.2)

    def wait_for_reason(self, presence: MakerPresence) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (reason := presence.reason_all_ended()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return reason

    def test_one_that_may_still_send_is_waited_for(self) -> None:
        presence = MakerPresence(["a", "b"], lambda name: False)
        presence.record_end("a", None)
        assert presence.reason_all_ended() is None  # b is not there yet

    def test_all_done_and_what_they_said(self) -> None:
        presence = MakerPresence(["a", "b"], lambda name: True)
        presence.start_fit()
        presence.record_end("a", None)
        presence.record_end("b", "ValueError: no")
        assert self.wait_for_reason(presence) == "a is done, b failed: ValueError: no"

    def test_one_whose_actor_is_gone_is_done(self) -> None:
        alive = {"a"}
        presence = MakerPresence(["a"], alive.__contains__)
        presence.record_start("a")
        assert presence.reason_all_ended() is None
        alive.clear()
        assert "lost" in self.wait_for_reason(presence)

    def test_one_that_is_there_but_silent_is_done(self) -> None:
        """Frozen, say. One that gave no sign of life yet is not expected to: it may still read its data."""
        now = [0.0]
        presence = MakerPresence(["a", "b"], lambda name: True, heartbeat_seconds=60, clock=lambda: now[0])
        for name in ("a", "b"):
            presence.record_start(name)
        presence.record_heartbeat("a")
        now[0] = 61
        presence.record_end("b", None)
        assert "a failed: it sent no heartbeat for 61 s" in self.wait_for_reason(presence)

    def test_one_that_goes_on_or_starts_again_is_waited_for(self) -> None:
        now = [0.0]
        presence = MakerPresence(["a"], lambda name: True, heartbeat_seconds=60, clock=lambda: now[0])
        for name in ("a", "b"):
            presence.record_start(name)
            presence.record_heartbeat(name)
        now[0] = 59
        presence.record_heartbeat("a")
        now[0] = 61
        presence.record_start("b")  # another actor of its name
        assert presence.reason_all_ended() is None
        now[0] = 118
        assert presence.reason_all_ended() is None


def test_lora_layers_of_another_scale_are_refused() -> None:
    from rlhf_core.config.sections import LoraConfig
    from rlhf_models import CausalLM
    from rlhf_ray.wire import check_lora_scales, lora_scales
    from rlhf_testing.models import builtin_model

    def model(alpha: float) -> nn.Module:
        return CausalLM().add_adapter(builtin_model("builtin:tiny-digits", 0)[0], LoraConfig(r=2, alpha=alpha), seed=0)

    sent = lora_scales(model(4))
    assert all(scales == {"default": 2.0} for scales in sent.values())
    assert sent
    check_lora_scales(model(4), sent)
    check_lora_scales(model(8), None)
    with pytest.raises(SyncError, match="LoRA layers differ"):
        check_lora_scales(model(8), sent)
    with pytest.raises(SyncError, match="LoRA layers differ"):
        check_lora_scales(nn.Linear(2, 2), sent)


def test_answers_end_with_the_tokens_that_were_asked_for() -> None:
    from rlhf_core.components import StrategyContext
    from rlhf_core.hooks.relay import HookRelay
    from rlhf_core.plugins.selected import load
    from rlhf_core.types import Prompt, SamplingParams
    from rlhf_ray.id_tokenizer import IdTokenizer
    from rlhf_ray.maker_parts import make_worker
    from rlhf_testing.models import builtin_model

    selected = load("strategies", "single")
    strategy = selected.build(selected.component.config(), StrategyContext(device="cpu"))
    actor = builtin_model("builtin:tiny-digits", 0)[0]
    ends = list(range(4, 16))
    worker = make_worker(
        lambda: (actor, None, lambda rollouts: [0.0] * len(rollouts), None),
        strategy,
        IdTokenizer(ends),
        SamplingParams(max_new_tokens=50),
        HookRelay(),
        eos_token_id=ends,
        engine="hf",
        engine_options={"max_batch_size": 2},
        seed=0,
        kl_coef=0.0,
        reward_timeout_seconds=60.0,
        sync_idle_seconds=60.0,
    )
    groups, _ = worker.make([Prompt(position=n, text="", prompt_ids=(5, 6)) for n in range(4)])
    worker.close()
    for group in groups:
        (rollout,) = group.rollouts
        assert rollout.sample_id == group.position
        assert rollout.finish_reason == "stop"
        assert rollout.completion_ids[-1] in ends and not set(rollout.completion_ids[:-1]) & set(ends)
        assert rollout.completion == " ".join(map(str, rollout.completion_ids[:-1]))
