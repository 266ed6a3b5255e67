"""The parts of the seed's classes that need no Ray."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlhf_core.errors import DataError, RlhfError, SyncError, UserInputError
from rlhf_core.types import Experience, Rollout
from rlhf_ray.detached_presence import MakerPresence
from rlhf_ray.detached_source import BufferSource, FitPlan
from rlhf_ray.detached_wire import num_bytes, pack, unpack
from rlhf_ray.holder_prompts import BatchReader, batches_of, maker_number, sample_id
from rlhf_ray.holder_reward import as_reward
from rlhf_ray.holder_sampling import read_generate_kwargs
from rlhf_ray.holder_sending import deal
from rlhf_ray.maker_worker import trained_names


def test_what_is_trained_beside_a_frozen_rest_has_names() -> None:
    module = nn.Linear(2, 2)
    assert trained_names(module) == frozenset()
    module.weight.requires_grad_(False)
    assert trained_names(module) == {"bias"}


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
        dealt, first = deal(list(range(made, made + size)), num_targets, first)  # type: ignore[arg-type]
        made += size
        for target, part in enumerate(dealt):
            received[target].extend(part)  # type: ignore[arg-type]
    assert received == [list(range(target, made, num_targets)) for target in range(num_targets)]


class TestSampling:
    def test_the_seeds_words(self) -> None:
        sampling = read_generate_kwargs({"max_length": 512, "top_k": 50, "pad_token_id": 0, "use_cache": True})
        assert (sampling.max_length, sampling.top_k, sampling.temperature) == (512, 50, 1.0)
        assert sampling.max_new_tokens == 512

    def test_greedy(self) -> None:
        assert read_generate_kwargs({"do_sample": False}).greedy

    @pytest.mark.parametrize("options", [{"top_q": 1}, {"temperature": 0}, {"top_p": 2}, {"max_length": 0}])
    def test_what_means_nothing_is_refused(self, options: dict[str, object]) -> None:
        with pytest.raises(UserInputError, match=next(iter(options))):
            read_generate_kwargs(options)


class Words:
    """A tokenizer of digits."""

    chat_template = None

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(c) for c in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(str, ids))


class TestPrompts:
    def read(self, batch: object) -> list[tuple[str, tuple[int, ...], object, dict[str, object]]]:
        reader = BatchReader(Words(), Words(), maker=3)  # type: ignore[arg-type]
        prompts = reader.read(batch, 7)
        assert [prompt.position for prompt in prompts] == [sample_id(3, 7, row) for row in range(len(prompts))]
        return [(p.text, p.prompt_ids, p.answer, dict(p.metadata)) for p in prompts]

    def test_padding_on_either_side_is_taken_off(self) -> None:
        batch = {
            "input_ids": torch.tensor([[0, 0, 1, 2], [3, 4, 5, 0]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]),
            "answer": ["x", "y"],
            "level": torch.tensor([1, 2]),
        }
        assert self.read(batch) == [("12", (1, 2), "x", {"level": 1}), ("345", (3, 4, 5), "y", {"level": 2})]

    def test_a_tensor_texts_and_records(self) -> None:
        assert self.read(torch.tensor([[1, 2]])) == [("12", (1, 2), None, {})]
        assert self.read(["12", "3"]) == [("12", (1, 2), None, {}), ("3", (3,), None, {})]
        assert self.read([{"prompt": "12", "answer": 4, "k": 5}]) == [("12", (1, 2), 4, {"k": 5})]
        assert self.read({"prompt": ["1", "2"]}) == [("1", (1,), None, {}), ("2", (2,), None, {})]

    @pytest.mark.parametrize("batch", [[], 3, {"text": ["1"]}, {"input_ids": [[1]], "answer": ["a", "b"]}])
    def test_what_is_no_batch_is_refused(self, batch: object) -> None:
        with pytest.raises(DataError, match="batch 7"):
            self.read(batch)

    def test_texts_need_a_tokenizer(self) -> None:
        with pytest.raises(DataError, match="no tokenizer"):
            BatchReader(None, Words(), maker=0).read(["12"], 0)

    @given(st.integers(0, (1 << 22) - 1), st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 16) - 1))
    def test_numbers_are_unique_and_fit(self, maker: int, step: int, row: int) -> None:
        number = sample_id(maker, step, row)
        assert 0 <= number < 1 << 62
        assert (number >> 40, number >> 16 & (1 << 24) - 1, number & (1 << 16) - 1) == (maker, step, row)

    def test_makers_have_numbers_of_their_own(self) -> None:
        assert len({maker_number(f"maker_{i}") for i in range(64)}) == 64

    def test_epochs_and_steps(self) -> None:
        assert list(batches_of([1, 2, 3], 2, 0)) == [1, 2, 3, 1, 2, 3]
        assert list(batches_of([1, 2, 3], 1, 5)) == [1, 2, 3, 1, 2]
        assert list(batches_of([1, 2, 3], 9, 2)) == [1, 2]
        with pytest.raises(DataError, match="second time"):
            list(batches_of(iter([1, 2]), 2, 0))


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


class TestSource:
    def test_later_passes_shuffle_the_same_batches(self) -> None:
        numbers = iter(range(100))
        source = BufferSource(FitPlan(10, 4, 3), lambda: experience(next(numbers)), seed=0)
        seen = []
        for index in range(3):
            passes = [[int(b.sample_ids) for b in batches] for batches in source.episode(index).epochs]
            assert [sorted(batches) for batches in passes] == [passes[0]] * 3
            seen += passes[0]
        assert seen == list(range(10))

    def test_a_shortfall_says_how_far_it_came_and_why(self) -> None:
        outcomes = iter([experience(0), "maker_0 is done"])
        source = BufferSource(FitPlan(4, 4, 1), lambda: next(outcomes), seed=0)
        with pytest.raises(RlhfError, match="after 1 of 4 batches: maker_0 is done"):
            [list(batches) for batches in source.episode(0).epochs]

    @pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
    def test_a_fit_has_steps(self, wrong: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            FitPlan(*wrong)


class TestPresence:
    def wait_for_reason(self, presence: MakerPresence) -> str:
        deadline = time.monotonic() + 30
        while (reason := presence.reason_for_none()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return reason

    def test_one_that_may_still_send_is_waited_for(self) -> None:
        presence = MakerPresence(["a", "b"], lambda name: False)
        presence.done("a", None)
        assert presence.reason_for_none() is None  # b is not there yet

    def test_all_done_and_what_they_said(self) -> None:
        presence = MakerPresence(["a", "b"], lambda name: True)
        presence.fit_begins()
        presence.done("a", None)
        presence.done("b", "ValueError: no")
        assert self.wait_for_reason(presence) == "a is done; b failed: ValueError: no"

    def test_one_whose_actor_is_gone_is_done(self) -> None:
        alive = {"a"}
        presence = MakerPresence(["a"], alive.__contains__)
        presence.started("a", 1.0)
        assert presence.reason_for_none() is None
        alive.clear()
        assert "gone" in self.wait_for_reason(presence)

    def test_temperatures_must_agree(self) -> None:
        presence = MakerPresence([], lambda name: True)
        assert presence.temperature is None
        presence.started("a", 0.7)
        assert presence.temperature == 0.7
        presence.started("b", 1.0)
        with pytest.raises(UserInputError, match="temperatures"):
            _ = presence.temperature


def rollout(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Rollout:
    return Rollout(
        sample_id=0,
        prompt="",
        messages=None,
        prompt_ids=prompt,
        completion="",
        completion_ids=answer,
        logprobs=(0.0,) * len(answer),
        answer=None,
        metadata={},
        policy_version=0,
        finish_reason="stop",
    )


class TestReward:
    def test_a_model_is_read_at_the_last_real_token_even_if_that_pads(self) -> None:
        from transformers import LlamaConfig, LlamaForSequenceClassification

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=2,
        )
        model = LlamaForSequenceClassification(config).eval()
        rows = [((5, 6), (7, 2)), ((5,), (9, 10, 11, 2)), ((8,), (4,))]
        with torch.no_grad():
            hidden = [model.model(torch.tensor([p + a])).last_hidden_state[0, -1] for p, a in rows]
            expected = [float(model.score(state)) for state in hidden]
        reward = as_reward(model, torch.device("cpu"))
        assert reward([rollout(p, a) for p, a in rows]) == pytest.approx(expected, abs=1e-6)

    def test_a_function_stays_itself(self) -> None:
        def brevity(rollouts: object) -> list[float]:
            return []

        assert as_reward(brevity, torch.device("cpu")) is brevity

    def test_what_cannot_score_is_refused(self) -> None:
        with pytest.raises(UserInputError, match="reward model"):
            as_reward(3, torch.device("cpu"))


def test_lora_layers_of_another_scale_are_refused() -> None:
    from rlhf_core.builtin_models import build_builtin
    from rlhf_core.config import LoraConfig
    from rlhf_core.models import add_lora
    from rlhf_ray.detached_lora import check_lora_scales, lora_scales

    def model(alpha: float) -> nn.Module:
        return add_lora(build_builtin("builtin:tiny-digits", 0)[0], LoraConfig(r=2, alpha=alpha), seed=0)

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
    from rlhf_core.builtin_models import build_builtin
    from rlhf_core.components import StrategyContext
    from rlhf_core.hooks import HookRelay
    from rlhf_core.plugins import load, resolve_build
    from rlhf_core.types import Prompt, SamplingParams
    from rlhf_ray.holder_models import IdTokenizer, make_models, make_worker, set_eos

    selected = load("strategies", "single")
    strategy = resolve_build(selected)(selected.component.config(), StrategyContext(device="cpu"))
    actor = build_builtin("builtin:tiny-digits", 0)[0]
    models = make_models(lambda: (actor, None, lambda rollouts: [0.0] * len(rollouts), None), strategy, kl_coef=0.0)
    ends = list(range(4, 16))
    set_eos(actor, ends)
    worker = make_worker(
        models,
        strategy,
        IdTokenizer(ends),
        SamplingParams(max_new_tokens=50),
        HookRelay(),
        engine="hf",
        engine_options={"max_batch_size": 2},
        seed=0,
        kl_coef=0.0,
        reward_timeout_seconds=60.0,
        sync_idle_seconds=60.0,
    )
    groups = worker.make([Prompt(position=n, text="", prompt_ids=(5, 6)) for n in range(4)])
    worker.close()
    for group in groups:
        (rollout,) = group.rollouts
        assert rollout.sample_id == group.position
        assert rollout.finish_reason == "stop"
        assert rollout.completion_ids[-1] in ends and not set(rollout.completion_ids[:-1]) & set(ends)
        assert rollout.completion == " ".join(map(str, rollout.completion_ids[:-1]))
