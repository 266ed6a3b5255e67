"""The value model."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import constants

from rlhf_core.batching import collate
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import UserInputError
from rlhf_core.strategy import Strategy
from rlhf_core.types import BufferItem
from rlhf_forward.forward import value_forward
from rlhf_models import CausalLM
from rlhf_passes.fast_passes import fast_passes
from rlhf_ppo import Critic
from rlhf_ppo.seed_trainer.saving import save_critic


def wakened(actor: Any) -> Critic:
    """A critic whose head says something."""
    critic = Critic.from_pretrained(actor).eval()
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
    return critic


def test_a_new_critic_says_zero_and_owns_its_weights(actor: Any) -> None:
    critic = Critic.from_pretrained(actor)
    ids = torch.tensor([[4, 5, 6]])
    assert not critic(ids, torch.ones_like(ids)).any()
    theirs = {tensor.data_ptr() for tensor in actor.parameters()}
    assert not theirs & {tensor.data_ptr() for tensor in critic.parameters()}


def test_the_value_of_an_action_is_read_before_it(actor: Any, make_items: Callable[..., list[BufferItem]]) -> None:
    critic = wakened(actor)
    items = make_items(5)
    together = value_forward(critic, collate(items)).detach()
    for row, item in enumerate(items):
        whole = torch.cat([item.prompt_ids, item.response_ids])[None]
        alone = critic(whole, torch.ones_like(whole))[0].detach()
        start = item.prompt_ids.numel() - 1
        expected = alone[start : start + item.num_response_tokens]
        torch.testing.assert_close(together[row, : len(expected)], expected, rtol=1e-5, atol=1e-6)


def test_the_value_does_not_see_the_action(actor: Any, make_items: Callable[..., list[BufferItem]]) -> None:
    critic = wakened(actor)
    item = make_items(1)[0]
    batch = collate([item])
    changed = batch.sequences.clone()
    changed[0, -1] = 4 if changed[0, -1] != 4 else 5
    before = value_forward(critic, batch).detach()
    inputs = {"attention_mask": batch.attention_mask.long()}
    after = critic(changed, **inputs)[:, -item.num_response_tokens - 1 : -1].detach()
    torch.testing.assert_close(before, after)


def test_values_and_gradients_are_the_same_without_padding(
    actor: Any, make_items: Callable[..., list[BufferItem]]
) -> None:
    critic, batch = wakened(actor), collate(make_items(5))

    def run() -> list[torch.Tensor]:
        critic.zero_grad()
        values = value_forward(critic, batch)
        (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
        return [values.detach(), *(p.grad.clone() for p in critic.parameters())]

    assert not critic.takes_packed_rows
    padded = run()
    with fast_passes(critic):
        assert critic.takes_packed_rows
        packed = run()
    for ours, theirs in zip(packed, padded, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_saved_and_loaded_it_says_the_same(actor: Any, tmp_path: Path) -> None:
    critic = wakened(actor)
    critic.save_pretrained(tmp_path)
    loaded = Critic.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[4, 5, 6, 7]])
    mask = torch.ones_like(ids)
    assert torch.equal(loaded(ids, mask).detach(), critic(ids, mask).detach())
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in tmp_path.rglob("*"))


def test_a_folder_of_a_language_model_gets_a_new_head(actor: Any, tmp_path: Path) -> None:
    actor.save_pretrained(tmp_path)
    critic = Critic.from_pretrained(tmp_path)
    ours, theirs = critic.trunk.state_dict(), actor.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not critic.value_head.weight.any()


def test_a_hub_that_does_not_answer_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:  # this port refuses connections
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(UserInputError, match="neither a local folder nor in the cache.*does not answer") as caught:
            Critic.from_pretrained("no-such-owner/no-such-model")
    assert caught.value.where == "Critic.from_pretrained"
    with pytest.raises(UserInputError, match="there is no folder './missing'"):
        Critic.from_pretrained("./missing")


@pytest.mark.parametrize("count", [-1, 10**9])
def test_impossible_layer_counts_are_an_error_before_a_model_is_built(actor: Any, tmp_path: Path, count: int) -> None:
    actor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    with pytest.raises(UserInputError, match=f"num_hidden_layers: {count}"):
        Critic.from_pretrained(tmp_path)


def test_of_an_actor_with_lora_it_trains_an_adapter_of_its_own(actor: Any) -> None:
    adapted = CausalLM().add_adapter(actor, LoraConfig(r=4), seed=0)
    critic = Critic.from_pretrained(adapted)
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {"value_head.weight", "value_head.bias"} <= trained
    assert all("lora_" in name or name.startswith("value_head") for name in trained)
    assert any("lora_" in name for name in trained)


@pytest.mark.parametrize("wrapped", ["trunk of an actor with LoRA", "trunk", "whole"])
def test_with_lora_it_is_saved_merged(
    actor: Any, make_strategy: Callable[..., Strategy], tmp_path: Path, wrapped: str
) -> None:
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ids = torch.tensor([[4, 5, 6, 7]])
    mask = torch.ones_like(ids)
    without = wakened(actor)(ids, mask).detach()
    critic: Any
    if wrapped == "trunk of an actor with LoRA":
        critic = wakened(peft.get_peft_model(actor, options))
    else:
        critic = wakened(actor)
        if wrapped == "trunk":
            critic.trunk = peft.get_peft_model(critic.trunk, options)
        else:
            critic = peft.get_peft_model(critic, options)
    strategy = make_strategy()
    optimizer = strategy.make_optimizer([p for p in critic.parameters() if p.requires_grad], lr=1e-3)
    save_critic(strategy, strategy.prepare(critic, optimizer).model, tmp_path)
    loaded = Critic.from_pretrained(tmp_path).eval()
    expected = critic.eval()(ids, mask).detach()
    torch.testing.assert_close(loaded(ids, mask).detach(), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(without, expected, atol=1e-3)


def test_the_file_of_a_critic_whose_module_rounds_has_all_digits(actor: Any, tmp_path: Path) -> None:
    """Under Gemini the module is bfloat16 and the gathered weights float32: the folder's config names the latter."""
    critic = wakened(actor)
    exact = {name: tensor.detach().clone() for name, tensor in critic.state_dict().items()}
    critic.to(torch.bfloat16).save_pretrained(tmp_path, exact)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = Critic.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in exact.items())
