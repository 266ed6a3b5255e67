"""What a detached trainer trains, without Ray: the numbers, what is sent, what is saved."""

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from running import PATIENCE_SECONDS
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_core.batching import collate, split
from rlhf_core.columns import ENGINE_COLUMNS, TEMPERATURE, Columns
from rlhf_core.components import StrategyContext
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.plugins.selected import load
from rlhf_core.strategy import Strategy
from rlhf_core.training.updater import Updater
from rlhf_core.types import BufferItem, Experience
from rlhf_forward.forward import policy_forward, value_forward
from rlhf_models import CausalLM
from rlhf_ppo import Critic
from rlhf_ppo.algorithm import PPO
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.seed_trainer.detached_learner import DetachedLearner
from rlhf_ray.calls import NamedActors
from rlhf_ray.checksum import Checksum
from rlhf_ray.ray_sync import MakerSync
from rlhf_ray.wire import pack, unpack

LR = {"policy": 1e-2, "critic": 1e-2}
CONFIG = PPOConfig(kl_coef=0.0)


@pytest.fixture
def experience() -> Experience:
    """Six samples of various lengths, scored and with a KL coefficient of their own, as a maker sends them."""
    random = torch.Generator().manual_seed(0)

    def item(number: int) -> BufferItem:
        length = 1 + number % 3
        return BufferItem(
            sample_id=number,
            group_id=number,
            policy_version=0,
            prompt_ids=torch.randint(4, 16, (2 + number % 2,), generator=random),
            response_ids=torch.randint(4, 16, (length,), generator=random),
            action_mask=torch.ones(length, dtype=torch.bool),
            action_log_probs=-2.7 + 0.1 * torch.randn(length, generator=random),
            reference_log_probs=torch.full((length,), -2.5),
            rewards={"reward": float(number % 2)},
            values=0.1 * torch.randn(length, generator=random),
            kl_coef=0.1,
        )

    return collate([item(number) for number in range(6)])


@pytest.fixture
def make_learner(actor: nn.Module, make_strategy: Callable[..., Strategy]) -> Callable[..., DetachedLearner]:
    def make(model: nn.Module | None = None, micro_batch_tokens: int | None = None) -> DetachedLearner:
        policy = copy.deepcopy(actor if model is None else model)
        models = (policy, Critic.from_pretrained(policy))
        return DetachedLearner(make_strategy(), lambda: models, CONFIG, lr=LR, micro_batch_tokens=micro_batch_tokens)

    return make


def weights(learner: DetachedLearner, role: str = "policy") -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.unwrapped(role).state_dict().items()}


def test_a_step_is_ppos_own_update(make_learner: Callable[..., DetachedLearner], experience: Experience) -> None:
    """At the temperature that its maker gave it."""
    learner, other = make_learner(), make_learner()
    at = Columns({TEMPERATURE: torch.full(experience.action_mask.shape, 0.8)}, ENGINE_COLUMNS)
    metrics = learner.step(replace(experience, columns=at))
    ppo = PPO(CONFIG, temperature=0.8)
    scored = ppo.advantages(replace(experience, scores=experience.rewards["reward"]))
    expected = Updater(ppo, other.strategy, other.trained).update(split(scored))
    assert metrics == pytest.approx(expected)
    for role in ("policy", "critic"):
        for name, tensor in weights(learner, role).items():
            assert torch.equal(tensor, weights(other, role)[name]), name


def test_the_makers_kl_coefficient_counts(make_learner: Callable[..., DetachedLearner], experience: Experience) -> None:
    with_kl, without = make_learner(), make_learner()
    with_kl.step(experience)
    without.step(replace(experience, kl_coef=torch.zeros(6)))
    assert not torch.equal(weights(with_kl)["lm_head.weight"], weights(without)["lm_head.weight"])


class Together:
    """Ranks of one process group, as threads: what they reduce is summed."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=PATIENCE_SECONDS)
        self.parts: dict[int, torch.Tensor] = {}

    def all_reduce(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = tensor
        self.barrier.wait()
        total = sum(self.parts.values(), torch.zeros_like(tensor))
        self.barrier.wait()
        return total


@pytest.mark.parametrize("sizes", [(3, 3), (1, 5)])
def test_advantages_are_whitened_over_the_batches_of_all_trainers(
    make_learner: Callable[..., DetachedLearner],
    experience: Experience,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
) -> None:
    """The second time, one of the batches is a single token."""
    advantages: dict[int, torch.Tensor] = {}

    def note(self: Updater, items: Sequence[BufferItem]) -> dict[str, float]:
        advantages.update({item.sample_id: item.advantages for item in items if item.advantages is not None})
        return {}

    monkeypatch.setattr(Updater, "update", note)
    items = split(experience)
    make_learner().step(experience)
    alone, advantages = advantages, {}
    together, learners = Together(2), [make_learner(), make_learner()]
    for rank, learner in enumerate(learners):
        monkeypatch.setattr(learner.strategy, "all_reduce", partial(together.all_reduce, rank))
    batches = [collate(items[: sizes[0]]), collate(items[sizes[0] :])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda learner, batch: learner.step(batch), learners, batches))
    assert advantages.keys() == alone.keys()
    for number, expected in alone.items():
        torch.testing.assert_close(advantages[number], expected, rtol=1e-6, atol=1e-6)


def test_micro_batches_change_nothing(make_learner: Callable[..., DetachedLearner], experience: Experience) -> None:
    whole, parts = make_learner(), make_learner(micro_batch_tokens=8)
    assert parts.step(experience) == pytest.approx(whole.step(experience), rel=1e-4, abs=1e-6)


def test_a_better_answer_becomes_more_likely(
    make_learner: Callable[..., DetachedLearner], experience: Experience
) -> None:
    learner = make_learner()
    policy = learner.unwrapped("policy")

    def gap() -> float:
        with torch.no_grad():
            log_probs = policy_forward(policy, experience, 1.0).log_probs.sum(-1) / experience.action_mask.sum(-1)
        return float(log_probs[1::2].mean() - log_probs[::2].mean())

    before = gap()
    for _ in range(5):
        learner.step(experience)
    assert gap() > before


def test_samples_without_values_or_rewards_are_explained(
    make_learner: Callable[..., DetachedLearner], experience: Experience
) -> None:
    with pytest.raises(UserInputError, match="lack values"):
        make_learner().step(replace(experience, values=None))
    with pytest.raises(UserInputError, match="lack rewards"):
        make_learner().step(replace(experience, rewards={}))


def sent_by(learner: DetachedLearner, *, adapter: bool = False) -> MakerSync:
    """What sends the learner's weights, to nobody."""
    adapters = {role: learner.trained_names(role) for role in learner.trained} if adapter else {}
    makers = NamedActors([], timeout_seconds=1)
    return MakerSync(learner.strategy, learner.trained, adapters, makers, sender="t", timeout_seconds=1)


def test_shards_are_bounded_and_whole(make_learner: Callable[..., DetachedLearner]) -> None:
    learner = make_learner()
    shards = list(sent_by(learner).shards("policy", 4096, adapter_only=False))
    assert len(shards) > 2
    assert all(len(s) == 1 or sum(t.numel() * t.element_size() for t in s.values()) <= 4096 for s in shards)
    assert {name for shard in shards for name in shard} == weights(learner).keys()


def test_an_adapter_is_all_that_is_trained(
    make_learner: Callable[..., DetachedLearner], actor: Any, experience: Experience
) -> None:
    learner = make_learner(CausalLM().add_adapter(actor, LoraConfig(r=2), seed=0))
    before = {role: weights(learner, role) for role in learner.trained}
    for _ in range(4):  # lora_B, lora_A and the head start at zero, and hold each other up
        learner.step(experience)
    sync = sent_by(learner, adapter=True)
    for role in learner.trained:
        sent = {name for shard in sync.shards(role, 1 << 20, adapter_only=True) for name in shard}
        after = weights(learner, role)
        changed = {name for name in after if not torch.equal(after[name], before[role][name])}
        assert changed == sent
    assert "value_head.weight" in sent


def test_without_an_adapter_there_is_none_to_send(make_learner: Callable[..., DetachedLearner]) -> None:
    with pytest.raises(UserInputError, match="without a LoRA adapter"):
        make_learner().trained_names("policy")


@pytest.mark.parametrize("lora", [False, True])
def test_a_saved_actor_is_a_plain_model(
    make_learner: Callable[..., DetachedLearner], actor: Any, experience: Experience, tmp_path: Path, lora: bool
) -> None:
    learner = make_learner(CausalLM().add_adapter(actor, LoraConfig(r=2), seed=0) if lora else None)
    learner.step(experience)
    learner.step(experience)
    learner.save("policy", tmp_path / "actor")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    with torch.no_grad():
        expected = policy_forward(learner.unwrapped("policy"), experience, 1.0).log_probs
        assert torch.allclose(policy_forward(saved, experience, 1.0).log_probs, expected, atol=1e-5)


def test_gemini_trains_sends_and_saves_an_adapter(
    make_actor: Callable[..., Any], experience: Experience, tmp_path: Path
) -> None:
    """Weights of 32 KiB and more, of which a checksum makes sums; kept in 16 bits where they are frozen."""
    selected = load("strategies", "gemini")
    strategy: Strategy = selected.build(selected.component.config(), StrategyContext(device="cpu"))
    policy = CausalLM().add_adapter(make_actor(hidden_size=128), LoraConfig(r=2), seed=0)
    models = (policy, Critic.from_pretrained(policy))
    learner = DetachedLearner(strategy, lambda: models, CONFIG, lr=LR)
    try:
        learner.step(experience)
        for role in learner.trained:
            sent, arrived = Checksum(), Checksum()
            for shard in sent_by(learner).shards(role, 1 << 20, adapter_only=False):
                sent.add(shard)
                arrived.add(unpack(pack(shard)))
            assert sent.hexdigest() == arrived.hexdigest()
        learner.save("policy", tmp_path / "actor")
    finally:
        strategy.teardown()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert saved.dtype == torch.float32
    written = load_file(tmp_path / "actor" / "model.safetensors")
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in written.items())


def test_a_saved_critic_and_optimizer_come_back(
    make_learner: Callable[..., DetachedLearner], experience: Experience, tmp_path: Path
) -> None:
    learner, other = make_learner(), make_learner()
    learner.step(experience)
    learner.save("critic", tmp_path / "critic")
    loaded = Critic.from_pretrained(tmp_path / "critic").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(learner, "critic").items())
    learner.save_optimizer("policy", tmp_path / "optimizer")
    other.strategy.load_optimizer(other.trained["policy"].optimizer, tmp_path / "optimizer")
    states = [each.trained["policy"].optimizer.state_dict()["state"] for each in (learner, other)]
    assert torch.equal(states[0][0]["exp_avg"], states[1][0]["exp_avg"])


def test_a_saved_critic_with_lora_is_a_plain_one(
    make_learner: Callable[..., DetachedLearner], actor: Any, experience: Experience, tmp_path: Path
) -> None:
    learner = make_learner(CausalLM().add_adapter(actor, LoraConfig(r=2), seed=0))
    for _ in range(2):
        learner.step(experience)
    learner.save("critic", tmp_path / "critic")
    loaded = Critic.from_pretrained(tmp_path / "critic").eval()
    with torch.no_grad():
        expected = value_forward(learner.unwrapped("critic").eval(), experience)
        assert expected.any()
        torch.testing.assert_close(value_forward(loaded, experience), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("returned", [None, (1, 2), (nn.Linear(1, 1),)])
def test_a_model_fn_that_returns_something_else_is_named(make_strategy: Callable[..., Strategy], returned: Any) -> None:
    with pytest.raises(UserInputError, match=r"model_fn.*\(actor, critic\)"):
        DetachedLearner(make_strategy(), lambda: returned, CONFIG, lr=LR)


def test_a_strategy_fn_that_returns_something_else_is_named() -> None:
    with pytest.raises(UserInputError, match="strategy_fn: it returned a str"):
        DetachedLearner("ddp", lambda: None, CONFIG, lr=LR)  # type: ignore[arg-type, return-value]


def test_the_package_loads_nothing_heavy_until_asked() -> None:
    code = "import sys, rlhf_ppo, rlhf_ray; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import rlhf_ppo

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rlhf_ppo.seed_trainer.detached", raising=False)
    monkeypatch.delitem(vars(rlhf_ppo), "DetachedPPOTrainer", raising=False)  # left by an earlier test
    with pytest.raises(ImportError, match=r"pip install 'rlhf-ppo\[ray\]'"):
        _ = rlhf_ppo.DetachedPPOTrainer
    assert not hasattr(rlhf_ppo, "no_such_name")


def test_a_subclass_may_make_the_step_itself(
    actor: nn.Module, make_strategy: Callable[..., Strategy], experience: Experience
) -> None:
    """With the attributes that the seed's own step uses."""
    from rlhf_ppo import DetachedPPOTrainerBase

    class Likelihood(DetachedPPOTrainerBase):
        def training_step(self, experience: Experience) -> dict[str, float]:
            log_probs = policy_forward(self.actor, experience, 1.0).log_probs
            loss = -log_probs.mean()
            self.actor_booster.backward(loss, self.actor_optim)
            self.actor_optim.step()
            self.actor_optim.zero_grad()
            value = self.critic(experience.sequences, experience.attention_mask).square().mean()
            self.critic_booster.backward(value, self.critic_optim)
            self.critic_optim.step()
            self.critic_optim.zero_grad()
            return {"actor_loss": loss.item(), "critic_loss": value.item()}

    strategy = make_strategy()
    models = (actor, Critic.from_pretrained(actor))
    trainer = Likelihood(["maker_0"], lambda: strategy, lambda: models, actor_lr=1e-2)
    assert trainer.strategy is strategy
    before = trainer.training_step(experience)
    assert trainer.training_step(experience)["actor_loss"] < before["actor_loss"]


@pytest.mark.usefixtures("losing_a_peer")
def test_a_process_lost_during_an_update_is_named(make_learner, experience, monkeypatch):
    def update(*args: Any) -> dict[str, float]:
        raise ConnectionError("Connection closed by peer")

    monkeypatch.setattr(Updater, "update", update)
    with pytest.raises(RlhfError, match="rank 1 is gone"):
        make_learner().step(experience)
