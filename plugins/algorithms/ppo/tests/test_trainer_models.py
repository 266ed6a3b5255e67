"""PPOTrainer on LoRA actors, in bf16, with gradient checkpointing, and behind a Booster."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import UserInputError
from rlhf_core.strategy import Strategy
from rlhf_models import CausalLM
from rlhf_models.gradient_checkpointing import enable_gradient_checkpointing
from rlhf_ppo import PPOTrainer
from rlhf_ppo.seed_trainer.booster import is_booster
from rlhf_strategies.shards import load_weights, save_weights, state_dict_shards_of


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def lora_actor(make_actor: Callable[..., Any]) -> Any:
    return CausalLM().add_adapter(make_actor(), LoraConfig(r=4), seed=0)


def test_with_lora_the_reference_is_the_adapter_off(
    make_trainer: Callable[..., PPOTrainer], lora_actor: Any, prompt_loader: Any, folder: str
) -> None:
    ids = prompt_loader[0]["input_ids"]
    with torch.no_grad():
        start = lora_actor(ids).logits
    base = {name: t.clone() for name, t in lora_actor.state_dict().items() if "lora_" not in name}
    trainer = make_trainer(actor=lora_actor, reference=None, lr=2e-2, kl_coef=0.1)
    trainer.fit(3, 1, 2, prompt_loader, log_dir=folder)
    rows = lines(folder)
    assert rows[0]["kl/mean"] == pytest.approx(0.0, abs=1e-5)
    assert abs(rows[-1]["kl/mean"]) > 1e-3
    with torch.no_grad():
        assert not torch.allclose(lora_actor(ids).logits, start)
        with lora_actor.disable_adapter():
            assert torch.equal(lora_actor(ids).logits, start)
    assert all(torch.equal(lora_actor.state_dict()[name], tensor) for name, tensor in base.items())


def test_lora_checkpoints_load_again(
    make_trainer: Callable[..., PPOTrainer], make_actor: Callable[..., Any], prompt_loader: Any, folder: str
) -> None:
    def trainer() -> PPOTrainer:
        actor = CausalLM().add_adapter(make_actor(), LoraConfig(r=4), seed=0)
        return make_trainer(actor=actor, reference=None, save_interval=1, save_dir=folder)

    saved = trainer()
    saved.fit(1, 1, 1, prompt_loader)
    loaded = trainer()
    loaded.load_checkpoint()
    for name, tensor in saved.actor.state_dict().items():
        assert torch.equal(loaded.actor.state_dict()[name], tensor), name


def test_a_lora_policy_of_a_checkpoint_loads_with_transformers(
    make_trainer: Callable[..., PPOTrainer], lora_actor: Any, prompt_loader: Any, folder: str
) -> None:
    trainer = make_trainer(actor=lora_actor, reference=None, lr=2e-2, save_interval=1, save_dir=folder)
    trainer.fit(1, 1, 2, prompt_loader)
    newest = Path(folder) / "step-2" / "policy"
    loaded = AutoModelForCausalLM.from_pretrained(newest)
    ids = prompt_loader[0]["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.actor(ids).logits, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(newest)("12>")["input_ids"] == [5, 6, 14]


def test_the_config_of_a_saved_policy_names_the_type_of_its_file(
    make_trainer: Callable[..., PPOTrainer], make_actor: Callable[..., Any], prompt_loader: Any, folder: str
) -> None:
    actor = make_actor()
    actor.config.dtype = torch.bfloat16  # as under Gemini: the module computes in 16 bits, the file has 32
    make_trainer(actor=actor, save_interval=1, save_dir=folder).fit(1, 1, 1, prompt_loader)
    config = json.loads((Path(folder) / "step-1" / "policy" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_bf16(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str) -> None:
    trainer = make_trainer(precision="bf16")
    trainer.fit(1, 1, 2, prompt_loader, log_dir=folder)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.actor.parameters())
    assert all(row["loss/policy"] is not None for row in lines(folder))


def test_gradient_checkpointing_gives_the_same_run(
    make_trainer: Callable[..., PPOTrainer], make_actor: Callable[..., Any], prompt_loader: Any
) -> None:
    plain, saving = make_actor(), make_actor()
    enable_gradient_checkpointing(saving)
    for actor in (plain, saving):
        make_trainer(actor=actor).fit(1, 1, 2, prompt_loader)
    for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_dropout_is_off_where_ratios_are_compared(
    make_trainer: Callable[..., PPOTrainer], make_actor: Callable[..., Any], prompt_loader: Any, folder: str
) -> None:
    actor = CausalLM().add_adapter(make_actor(), LoraConfig(r=4, dropout=0.5), seed=0)
    make_trainer(actor=actor, reference=None).fit(2, 1, 1, prompt_loader, log_dir=folder)
    assert all(row["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4) for row in lines(folder)[::2])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.slow_except("True")
def test_where_weights_are_sharded_the_engine_has_a_copy_that_is_kept_in_step(
    make_trainer: Callable[..., PPOTrainer],
    make_actor: Callable[..., Any],
    make_strategy: Callable[..., Strategy],
    prompt_loader: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: bool,
) -> None:
    def losses(name: str) -> list[float]:
        actor = CausalLM().add_adapter(make_actor(), LoraConfig(r=4), seed=0) if lora else make_actor()
        trainer = make_trainer(actor=actor, reference=None if lora else "copy", lr=1e-2)
        trainer.fit(3, 1, 2, prompt_loader, log_dir=str(tmp_path / name))
        return [row["loss/policy"] for row in lines(str(tmp_path / name))]

    whole = losses("whole")
    monkeypatch.setattr(type(make_strategy()), "shards_parameters", True)
    assert losses("sharded") == pytest.approx(whole, rel=1e-4, abs=1e-5)


class PlainBooster:
    """The part of a ColossalAI Booster that is used, around plain torch."""

    plugin = None

    def __init__(self) -> None:
        self.num_backward = 0

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self.num_backward += 1
        loss.backward()

    def no_sync(self, model: Any = None, optimizer: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def save_model(self, model: Any, checkpoint: str, shard: bool = False, use_safetensors: bool = False) -> None:
        assert use_safetensors
        save_weights(Path(checkpoint), state_dict_shards_of(model, 1 << 20))

    def load_model(self, model: Any, checkpoint: str) -> None:
        load_weights(model, Path(checkpoint), lambda name, own, read: own.copy_(read))

    def save_optimizer(self, optimizer: Any, checkpoint: str, shard: bool = False) -> None:
        Path(checkpoint).mkdir(parents=True)

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> None:
        assert Path(checkpoint).is_dir()


def test_boosters_train_as_a_strategy_does(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str
) -> None:
    actor_booster, critic_booster = PlainBooster(), PlainBooster()
    assert is_booster(actor_booster) and not is_booster(object())
    boosted = make_trainer(
        actor_booster=actor_booster, critic_booster=critic_booster, save_interval=1, save_dir=folder, train_batch_size=4
    )
    plain = make_trainer(train_batch_size=4)
    for trainer in (boosted, plain):
        trainer.fit(1, 1, 1, prompt_loader)
    assert (actor_booster.num_backward, critic_booster.num_backward) == (2, 2)
    for ours, theirs in zip(boosted.actor.parameters(), plain.actor.parameters(), strict=True):
        # The strategy clips the gradient at 1, the Booster's plugin would.
        assert (ours - theirs).abs().max() < 1e-3
    assert boosted.load_checkpoint() == 1


def test_one_booster_for_both(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any) -> None:
    booster = PlainBooster()
    make_trainer(actor_booster=booster, critic_booster=booster).fit(1, 1, 1, prompt_loader)
    assert booster.num_backward == 2


@pytest.mark.parametrize(("plugin", "ours"), [("LowLevelZeroPlugin", "low-level-zero"), ("GeminiPlugin", "gemini")])
def test_a_booster_that_needs_a_gpu_names_the_strategy_that_does_not(
    make_trainer: Callable[..., PPOTrainer], plugin: str, ours: str
) -> None:
    booster: Any = PlainBooster()
    booster.plugin = type(plugin, (), {})()
    with pytest.raises(UserInputError, match=f'(?s){plugin} does not train on a CPU.*"{ours}"'):
        make_trainer(actor_booster=booster, critic_booster=booster)
