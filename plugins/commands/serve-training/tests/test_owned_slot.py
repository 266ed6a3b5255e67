"""Strategies whose optimizer owns the parameters: one adapter, in the slot."""

import numpy as np
import pytest

from rlhf_core.errors import DivergenceError
from rlhf_serve_training.adapters import AdapterSpec
from rlhf_serve_training.options import WorkerOptions
from rlhf_serve_training.wire import Row
from rlhf_serve_training.worker import Worker

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.5}


def row(tokens, weights):
    ids = np.asarray(tokens, np.int64)
    return Row(ids[:-1], {"target_tokens": ids[1:], "weights": np.asarray(weights, np.float32)})


ROWS = [row([5, 6, 7, 8, 9], [0, 1, 1, 0.5]), row([9, 4, 6], [1, -1]), row([7, 7, 8, 4], [0.5, 1, 1])]


def loss(worker, name, rows=ROWS, backward=False):
    return worker.forward(name, rows, "cross_entropy", {}, backward)[1]["loss:sum"]


def steps(worker, name, count=3):
    """Losses and norms. Each step has two requests, and one that only asks for the loss between them."""
    found = []
    for index in range(count):
        options = {**ADAM, "grad_clip_norm": (0.0, 0.5, 1e-3)[index], "learning_rate": 1e-2 / (1 + index)}
        found += [loss(worker, name, ROWS[:1], True), loss(worker, name), loss(worker, name, ROWS[1:], True)]
        found.append(worker.optim_step(name, options)[0])
    return found


@pytest.fixture(scope="module")
def exact(base):
    """Losses and norms of `single`, and the loss afterwards."""
    worker = Worker(WorkerOptions(base, max_rank=8, device="cpu"))
    worker.create("m", AdapterSpec(4, seed=1))
    found = steps(worker, "m"), loss(worker, "m")
    worker.close()
    return found


@pytest.mark.parametrize(
    ("strategy", "options", "near"),
    [
        ("low-level-zero", {}, {"abs": 1e-4}),
        ("low-level-zero", {"stage": 2, "precision": "bf16"}, {"rel": 2e-2}),
        ("gemini", {}, {"rel": 2e-2}),
    ],
)
@pytest.mark.slow_except("low-level-zero-options0-near0")
def test_one_adapter_trains_as_with_single(base, tmp_path, exact, strategy, options, near):
    worker = Worker(
        WorkerOptions(
            base, strategy=strategy, strategy_options=options, max_rank=8, device="cpu", dtype="auto", max_adapters=1
        )
    )
    worker.create("m", AdapterSpec(4, seed=1))
    assert steps(worker, "m") == pytest.approx(exact[0], **near)
    after = loss(worker, "m")
    assert after == pytest.approx(exact[1], **near)
    folder = str(tmp_path / "state")
    assert worker.save_state("m", folder) == 3
    scores = worker.score(folder, [[5, 6, 7, 8, 9]], 0)[0][0]
    (output,) = worker.forward("m", ROWS[:1], "cross_entropy", {}, False)[0]
    assert scores == pytest.approx(output["logprobs"].tolist(), **(near | {"abs": 1e-2}))  # of a second copy
    assert loss(worker, "m") == after  # which does not disturb the slot
    loss(worker, "m", ROWS, True)
    norm = worker.optim_step("m", ADAM)
    more = loss(worker, "m")
    for _ in range(2):  # the same from the saved state, also after gradients without a step
        worker.unload("m")
        worker.load("m", folder, True)
        assert loss(worker, "m") == after
        loss(worker, "m", ROWS, True)
    assert worker.optim_step("m", ADAM) == norm
    assert loss(worker, "m") == more
    bad = row([5, 6, 7], [1e38, 1e38])
    with pytest.raises(DivergenceError):
        for _ in range(2):
            loss(worker, "m", [bad] * 8, True)
            worker.optim_step("m", {**ADAM, "learning_rate": 1e38})
    worker.load("m", folder, True)
    assert loss(worker, "m") == after
    worker.close()
