"""The real vLLM against transformers: samples, log-probs, new weights, a run, and a process that is killed."""

from __future__ import annotations

import copy
import json

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma2ForCausalLM, LlamaForCausalLM

from rlhf_core.config.sections import LoraConfig as LoraOptions
from rlhf_core.entry.train import train
from rlhf_core.errors import RlhfError
from rlhf_core.rollout import named_weights, replace_weights
from rlhf_core.types import SamplingParams
from rlhf_models import CausalLM
from rlhf_testing.contracts.engine import make_requests
from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run
from rlhf_testing.tiny import contract_policy, perturb

pytest.importorskip("vllm", reason="needs vLLM: make setup-vllm")
pytestmark = pytest.mark.slow
PLAIN = SamplingParams(max_new_tokens=24)
GAME = """
from rlhf_episodes import Outcome


class Branches:
    async def run(self, task, policy):
        first = await policy.turn(f"{task.seed % 100:02d}>")
        rewards = {first.turn: len(first.text) / 10}
        for branch in (policy.fork(), policy.fork()):
            for _ in range(2):
                reply = await branch.turn(">")
                rewards[reply.turn] = sum(char.isdigit() for char in reply.text) / 5
        return Outcome(turn_rewards=rewards)
"""
GREEDY = SamplingParams(max_new_tokens=24, greedy=True)


def greedy_of(module, requests) -> dict[int, tuple[int, ...]]:
    """What transformers answers greedily."""
    answers = {}
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        whole = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        answers[request.sample_id] = tuple(whole[0, prompt.shape[1] :].tolist())
    return answers


def tokens(found) -> dict[int, tuple[int, ...]]:
    return {key: each.token_ids for key, each in found.items()}


def test_a_sample_depends_on_seed_and_id_alone(module, engine, collect):
    asked = make_requests(40)
    first = collect(engine(module), asked, PLAIN)
    again = collect(engine(module, max_batch_size=7), asked[::-1], PLAIN)
    assert tokens(first) == tokens(again)
    same = collect(engine(module), make_requests(8, same_prompt=True), PLAIN)
    assert len(set(tokens(same).values())) == 8


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, SamplingParams(max_new_tokens=24, temperature=0.7), SamplingParams(max_new_tokens=24, top_k=8, top_p=0.8)],
    ids=["plain", "warm", "truncated"],
)
def test_log_probs_are_those_of_a_plain_forward(sampling, module, engine, collect):
    asked = make_requests(30)
    answers = collect(engine(module), asked, sampling)
    for request in asked:
        answer = answers[request.sample_id]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        with torch.no_grad():
            logits = module(ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / sampling.temperature
        if answer.support_ids is not None:
            outside = torch.ones_like(logits, dtype=torch.bool)
            for place, kept in enumerate(answer.support_ids):
                assert answer.token_ids[place] in kept
                outside[place, list(kept)] = False
            logits = logits.masked_fill(outside, -torch.inf)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None]).squeeze(-1)
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("max_shard_bytes", [4096, 1024**3], ids=["chunked", "full"])
def test_new_weights_in_place(max_shard_bytes, module, engine, collect):
    """The same prompts before and after, so that a prefix cached under the old weights would show."""
    made = engine(module, max_shard_bytes=max_shard_bytes)
    asked = make_requests(12)
    assert tokens(collect(made, asked, GREEDY)) == greedy_of(module, asked)
    sent = copy.deepcopy(module)
    for version in (1, 2):
        perturb(sent, seed=version)
        replace_weights(module, named_weights(sent), version)
        made.weights_updated(version)
        found = collect(made, asked, GREEDY)
        assert tokens(found) == greedy_of(sent, asked)
        assert {each.policy_version for each in found.values()} == {version}


@pytest.mark.parametrize("family", [LlamaForCausalLM, Gemma2ForCausalLM])
def test_new_weights_of_a_tied_output_layer(family, engine, collect):
    """vLLM's CPU build packs the output layer, and does not follow the input embedding. Gemma 2 lacks that layer."""
    sizes = contract_policy(hidden_size=64).config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    module = family(
        family.config_class(
            **{name: sizes[name] for name in (*names, "num_key_value_heads", "max_position_embeddings")},
            tie_word_embeddings=True,
            **({"head_dim": 32, "attn_logit_softcapping": None} if family is Gemma2ForCausalLM else {}),
        )
    ).eval()
    perturb(module, seed=0, scale=0.2)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    made, asked = engine(module), make_requests(12)
    for version in (0, 1):
        if version:
            perturb(module, seed=version, scale=0.2)
            made.weights_updated(version)
        assert tokens(collect(made, asked, GREEDY)) == greedy_of(module, asked)


def test_an_adapter_is_followed_and_does_not_pile_up(engine, collect):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = get_peft_model(contract_policy(hidden_size=64), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    module.eval()
    made, asked = engine(module), make_requests(12)
    plain = greedy_of(module, asked)
    assert tokens(collect(made, asked, GREEDY)) == plain
    for version in (1, 2, 3):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        made.weights_updated(version)
        expected = greedy_of(module, asked)
        assert expected != plain
        assert tokens(collect(made, asked, GREEDY)) == expected


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
def test_ppo_trains_with_it(lora, tmp_path):
    """Three episodes of a whole run; the trainer's log-probs agree with vLLM's at each."""
    folder = tmp_path / "model"
    tiny_model(tiny_tokenizer(), hidden_size=64, num_layers=2, num_heads=2, seed=0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    options = {"kv_cache_bytes": 64 * 1024**2, "max_new_tokens": 6}
    run = tiny_run(
        {
            "model": {"path": str(folder), "device": "cpu", "lora": lora},
            "engine": {"name": "vllm", **options},
            "train": {"episodes": 3},
        }
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    gaps = [line["rollout/logprob_gap_max"] for line in result.metrics if "rollout/logprob_gap_max" in line]
    assert len(gaps) >= 3 and max(gaps) < 1e-4


def test_episodes_of_several_turns_and_branches(tmp_path):
    """A run in an environment: the trainer's log-probs agree with vLLM's, and the same seeds give the same episodes."""
    (tmp_path / "game.py").write_text(GAME)
    folder = tmp_path / "model"
    tiny_model(tiny_tokenizer(), hidden_size=64, num_layers=2, num_heads=2, seed=0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    run = tiny_run(
        {
            "model": {"path": str(folder), "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "environment": {"name": f"{tmp_path}/game.py:Branches", "max_turns": 5},
            "engine": {"name": "vllm", "kv_cache_bytes": 64 * 1024**2, "max_new_tokens": 6},
            "train": {"episodes": 2, "samples_per_prompt": 2},
            "logging": {"samples": "all"},
        }
    )
    run = {key: value for key, value in run.items() if key not in ("prompts", "rewards")}
    played = []
    for name in ("once", "again"):
        result = train(run, output=tmp_path / name)
        assert max(line["rollout/logprob_gap_max"] for line in result.metrics) < 1e-4
        played.append((result.run_folder / "samples.jsonl").read_text())
    assert played[0] == played[1]
    lines = [json.loads(line) for line in played[0].splitlines()]
    assert {line["branch"] for line in lines} == {0, 1, 2}
    last = {(line["sample_id"], line["branch"]): line["turns"][-1]["text"] for line in lines}
    differ = [last[sample, 1] != last[sample, 2] for sample, branch in last if branch == 2]
    assert sum(differ) > len(differ) / 2, "two branches of one prefix draw different noise"


def test_a_killed_process_is_a_clear_error(module, engine, collect):
    made = engine(module)
    collect(made, make_requests(2), PLAIN)
    answers = made.generate(make_requests(40), PLAIN)
    next(answers)
    psutil.Process(made._backend._process.pid).kill()
    with pytest.raises(RlhfError, match="vLLM process crashed: its process was ended by SIGKILL"):
        list(answers)


@pytest.mark.parametrize("options", [{"rslora": True}, {"init": "pissa"}], ids=["rslora", "pissa"])
def test_an_adapter_that_vllm_applies_answers_as_the_model(options, module, engine, collect):
    model = CausalLM().add_adapter(module, LoraOptions(r=4, **options), seed=0)
    asked = make_requests(20)
    made = engine(model, adapter=True)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".default." in name:
                    generator = torch.Generator().manual_seed(version)
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        made.weights_updated(version)
        assert tokens(collect(made, asked, GREEDY)) == greedy_of(model, asked)
