"""vLLM's own process: what crosses, what is said when it fails, and that it never outlives its run.

The processes are real; the vLLM in them is `fake/vllm`, whose answers are first prompt token + sum of its weights.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import psutil
import pytest
import torch
from running import wait_until

from rlhf_core.errors import ConfigError, DataError, DeadlineError, EngineLostError, RlhfError, SyncError
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_testing.contracts.engine import make_requests

THREE = SamplingParams(max_new_tokens=3)
pytestmark = pytest.mark.usefixtures("fake_vllm")


def fill(module, value: int):
    """Weights that sum up to `value`."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        next(module.parameters()).view(-1)[0] = value
    return module


def process_of(engine) -> psutil.Process:
    return psutil.Process(engine._backend._process.pid)


@pytest.mark.parametrize(("sleeps", "workers"), [(False, 1), (True, 1), (True, 2)])
def test_answers_come_from_the_weights_that_were_there(sleeps, workers, module, engine, monkeypatch, collect):
    """The fake asserts that what is used is awake, and that what is woken was asleep."""
    if sleeps:
        monkeypatch.setenv("FAKE_VLLM_SLEEPS", "1")
    made = engine(fill(module, 5), tensor_parallel_size=workers)
    found = collect(made, make_requests(4), THREE)
    for request in make_requests(4):
        assert found[request.sample_id].token_ids == (request.prompt_ids[0] + 5,) * 3
    assert {each.policy_version for each in found.values()} == {0}
    assert collect(made, make_requests(4), THREE) == found, "again, without a publish between"
    fill(module, 9)
    assert collect(made, make_requests(4), THREE) == found, "what is trained reaches vLLM at a publish, not before"
    made.weights_updated(3)
    after = collect(made, make_requests(1), THREE)[100]
    assert (after.token_ids[0] - make_requests(1)[0].prompt_ids[0], after.policy_version) == (9, 3)


def test_a_turns_seed_is_hashed_from_run_sample_branch_and_offset(module, engine, monkeypatch):
    made = engine(module)
    places = itertools.product((7, 8), (0, 1), (0, 3))
    asked = [GenerationRequest(sample_id=s, prompt_ids=(5,), branch=b, offset=o) for s, b, o in places]
    jobs = []
    monkeypatch.setattr(made, "_single_version_completions", lambda given: iter(jobs.extend(given) or ()))
    for run_seed in (11, 12, 11):
        made._seed = run_seed
        assert not list(made.generate(asked, THREE))
    seeds = [job.seed for job in jobs]
    assert len(set(seeds)) == 2 * len(asked) and seeds[: len(asked)] == seeds[-len(asked) :]


@pytest.mark.parametrize("max_shard_bytes", [1024, 1024**3])
def test_weights_cross_whole_whatever_the_pieces(max_shard_bytes, module, engine, collect):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.25)
    made = engine(module, max_shard_bytes=max_shard_bytes)
    request = make_requests(1)[0]
    total = sum(parameter.numel() for parameter in module.parameters()) // 4
    assert collect(made, [request], THREE)[100].token_ids[0] == request.prompt_ids[0] + total
    assert not list(os.scandir(made._backend._scratch.name))


def test_a_generation_left_early_leaves_nothing_behind(module, engine, collect):
    made = engine(fill(module, 1))
    answers = made.generate(make_requests(50), THREE)
    next(answers)
    answers.close()
    made.weights_updated(1)  # the fake refuses weights while requests wait
    assert len(collect(made, make_requests(5), THREE)) == 5


def test_weights_that_arrive_in_the_middle_are_refused(module, engine):
    made = engine(fill(module, 1))
    answers = made.generate(make_requests(5), THREE)
    next(answers)
    made.policy_version = 1
    with pytest.raises(SyncError, match="version 0 was generating"):
        list(answers)


@pytest.mark.parametrize(("prompt", "message"), [((), "prompt is empty"), ((5,) * 600, "leaves no room")])
def test_a_prompt_without_room_is_an_error_at_once(prompt, message, module, engine):
    made = engine(module)
    with pytest.raises(DataError, match=f"sample 8: .*{message}"):
        made.generate([GenerationRequest(sample_id=8, prompt_ids=prompt)], THREE)


def test_truncation_that_cannot_be_told_is_an_error_at_once(module, engine):
    with pytest.raises(ConfigError, match="top_p needs top_k"):
        engine(module).generate(make_requests(1), SamplingParams(top_p=0.5))


def test_a_killed_process_is_named(module, engine, collect):
    made = engine(fill(module, 1))
    made._backend._process.kill()
    with pytest.raises(EngineLostError, match="vLLM process crashed: its process was ended by SIGKILL"):
        collect(made, make_requests(2), THREE)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("die", EngineLostError, "ended by SIGKILL"),
        ("fail", RlhfError, "vLLM failed: RuntimeError: kernel failed"),
    ],
)
def test_a_failure_in_the_middle_is_named(how, kind, message, module, engine, monkeypatch, collect):
    """Only a process that is gone may be replaced: what vLLM raised, it would raise again."""
    monkeypatch.setenv("FAKE_VLLM", how)
    with pytest.raises(RlhfError, match=message) as raised:
        collect(engine(module), make_requests(2), THREE)
    assert type(raised.value) is kind


def test_a_process_that_hangs_is_a_passed_deadline(module, engine, monkeypatch, collect):
    monkeypatch.setenv("FAKE_VLLM", "hang")
    made = engine(module, answer_timeout_seconds=1.0)
    process = process_of(made)
    with pytest.raises(DeadlineError, match="waited 1 s for a step of vLLM"):
        collect(made, make_requests(2), THREE)
    made.close()
    assert not process.is_running()


def test_weights_that_vllm_does_not_take_close_the_engine(module, engine, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "torn")
    made = engine(module)
    with pytest.raises(RlhfError, match="RuntimeError: out of memory"):
        made.weights_updated(1)
    assert made.policy_version == 0


def test_weights_that_nothing_arrived_for_are_named(module, engine, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "lacking")
    with pytest.raises(SyncError, match=r"did not get weights for lm_head\.bias"):
        engine(module).weights_updated(1)


def test_it_ends_with_the_engine(module, engine):
    made = engine(module)
    process = process_of(made)
    made.close()
    assert not process.is_running()


OWNER = """
import sys, time
sys.path[:0] = sys.argv[1:]
import torch
from rlhf_core.components import EngineContext
from rlhf_testing.tiny import contract_policy, contract_tokenizer
from rlhf_vllm.config import VllmEngineConfig
from rlhf_vllm.engine import build
context = EngineContext(model=contract_policy(), tokenizer=contract_tokenizer(), device=torch.device("cpu"), seed=1)
print(build(VllmEngineConfig(), context)._backend._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_it_ends_with_a_killed_run(fake_vllm):
    with subprocess.Popen([sys.executable, "-c", OWNER, str(fake_vllm)], stdout=subprocess.PIPE, text=True) as owner:
        try:
            process = psutil.Process(int(owner.stdout.readline()))
        finally:
            owner.kill()
    wait_until(
        lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the end of vLLM's process"
    )
