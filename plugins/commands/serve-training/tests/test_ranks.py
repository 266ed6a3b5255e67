"""Two processes against one, and refusals of strategies."""

import signal

import numpy as np
import psutil
import pytest
import tinker
from running_server import LEFT_BY_THE_SDK, client, datum, running
from tinker import types

from rlhf_core.errors import UserInputError
from rlhf_serve_training.adapters import AdapterSpec
from rlhf_serve_training.options import OWNING, WorkerOptions, check_strategy
from rlhf_serve_training.wire import Row
from rlhf_serve_training.worker import Worker

pytestmark = LEFT_BY_THE_SDK
TOKENS = [[5, 6, 7, 8, 9], [9, 4, 6], [7, 7, 8, 4]]
WEIGHTS = [[0, 1, 1, 0.5], [1, -1], [0.5, 1, 1]]
OPTIONS = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.5}
NUM_STEPS = 3


@pytest.fixture(scope="module")
def alone(base):
    """Losses and log-probs after steps of one process."""
    worker = Worker(WorkerOptions(base, max_rank=8, device="cpu"))
    worker.create("m", AdapterSpec(4, seed=1))
    rows = []
    for tokens, weights in zip(TOKENS, WEIGHTS, strict=True):
        ids = np.asarray(tokens, np.int64)
        rows.append(Row(ids[:-1], {"target_tokens": ids[1:], "weights": np.asarray(weights, np.float32)}))
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(worker.forward("m", rows, "cross_entropy", {}, True)[1]["loss:sum"])
        losses.append(worker.optim_step("m", OPTIONS)[0])
    outputs, _ = worker.forward("m", rows, "cross_entropy", {}, False)
    worker.close()
    return losses, [each["logprobs"].tolist() for each in outputs]


EXACT, BF16 = {"abs": 1e-5}, {"rel": 2e-2, "abs": 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "near", "transport"),
    [
        ("torch-ddp", EXACT, "local"),
        ("ddp", EXACT, "local"),
        ("fsdp", EXACT, "local"),
        ("low-level-zero", EXACT, "local"),
        ("gemini", BF16, "local"),
        ("fsdp", EXACT, "ray"),
    ],
)
def test_two_processes_compute_the_same(base, tmp_path, alone, strategy, near, transport):
    options = ("--num-processes", "2", "--strategy", strategy, "--transport", transport)
    with running(base, tmp_path / "output", *options) as server, client(server) as service:
        training = service.create_lora_training_client(base_model=base, rank=4, seed=1).result(60)
        data = [datum(tokens, weights=weights) for tokens, weights in zip(TOKENS, WEIGHTS, strict=True)]
        losses = []
        for _ in range(NUM_STEPS):
            forward = training.forward_backward(data, "cross_entropy")
            step = training.optim_step(types.AdamParams(**OPTIONS))
            losses += [forward.result(60).metrics["loss:sum"], step.result(60).metrics["grad_norm:max"]]
        path = training.save_state("c").result(60).path
        other = training
        if strategy in OWNING:
            with pytest.raises(tinker.BadRequestError, match="holds one adapter, and it is in use"):
                service.create_training_client_from_state_with_optimizer(path).result(60)
        else:
            other = service.create_training_client_from_state_with_optimizer(path).result(60)
        outputs = [each.forward(data, "cross_entropy").result(60).loss_fn_outputs for each in (training, other)]
        sampler = training.save_weights_and_get_sampling_client().result(60)
        prompts = [types.ModelInput.from_ints(tokens) for tokens in TOKENS]
        logprobs = [sampler.compute_logprobs(prompt).result(60)[1:] for prompt in prompts]
    assert losses == pytest.approx(alone[0], **near)
    for found in (*([each["logprobs"].data for each in output] for output in outputs), logprobs):
        for one, expected in zip(found, alone[1], strict=True):
            assert list(one) == pytest.approx(expected, **near)


@pytest.mark.slow
def test_a_killed_rank_on_ray_ends_the_command(base, tmp_path):
    """The command names the rank and exits, although threads of its process group waited for that rank."""
    options = ("--num-processes", "2", "--strategy", "fsdp", "--transport", "ray")
    with running(base, tmp_path / "output", *options) as server:
        below = psutil.Process(server.process.pid).children(recursive=True)
        (rank,) = [each for each in below if "RankActor" in " ".join(each.cmdline())]
        rank.kill()
        assert server.process.wait(120) not in (0, -signal.SIGKILL)
        assert "rank-1: its process exited" in server.text()


@pytest.mark.parametrize(
    ("options", "num_processes", "message"),
    [
        ({"strategy": "gemini"}, 2, "gemini holds one adapter, not 16"),
        ({"strategy": "low-level-zero"}, 2, "low-level-zero holds one adapter, not 16"),
        ({"strategy": "mine"}, 1, "'mine' is not supported"),
        ({"strategy": "single"}, 2, "`single` trains in one process, not in 2"),
        ({"strategy": "fsdp", "strategy_options": {"tensor_parallel": 2}}, 2, "tensor_parallel is not supported"),
    ],
)
def test_other_strategies_are_refused_by_name(options, num_processes, message):
    with pytest.raises(UserInputError, match=message):
        check_strategy(WorkerOptions("base", **options), num_processes)
