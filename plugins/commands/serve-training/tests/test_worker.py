"""Numbers of a rank: adapters in the slot, and steps against the code of `rlhf train`."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhf_core import train
from rlhf_serve_training.adapters import AdapterSpec
from rlhf_serve_training.options import WorkerOptions
from rlhf_serve_training.wire import Row
from rlhf_serve_training.worker import Worker

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}


@pytest.fixture(scope="module")
def worker(base):
    worker = Worker(WorkerOptions(base, max_rank=8, device="cpu"))
    yield worker
    worker.close()


def row(tokens, **fields):
    ids = np.asarray(tokens, np.int64)
    values = {key: np.asarray(value, np.float32) for key, value in fields.items()}
    return Row(ids[:-1], {"target_tokens": ids[1:]} | values)


ROWS = [row([5, 6, 7, 8, 9], weights=[0, 1, 1, 0.5]), row([9, 4, 6], weights=[1, -1])]


def steps(worker, name, rows=ROWS, count=3):
    found = []
    for _ in range(count):
        outputs, metrics = worker.forward(name, rows, "cross_entropy", {}, True)
        found.append((metrics["loss:sum"], [each["logprobs"].tolist() for each in outputs]))
        found.append(worker.optim_step(name, ADAM)[0])
    return found


def test_a_new_adapter_is_that_of_rlhf_train(worker, base):
    from rlhf_core.config import ModelConfig
    from rlhf_core.models import model_kind_for

    worker.create("new", AdapterSpec(3, seed=5))
    config = ModelConfig.model_validate({"path": base, "lora": {"r": 3}})
    model = model_kind_for(config).load_policy(dtype=torch.float32, seed=5)
    for name, value in model.named_parameters():
        if value.requires_grad:
            own = worker.adapters["new"].weights[name]
            assert torch.equal(own[: value.shape[0], : value.shape[1]], value.detach()), name
            assert own.abs().sum() == value.abs().sum()


def test_one_step_is_that_of_rlhf_train(worker, base, tmp_path):
    lines = [{"prompt": "12", "completion": "345"}, {"prompt": "9", "completion": "87"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    train(
        {
            "model": {"path": base, "lora": {"r": 4}},
            "algorithm": {"name": "sft"},
            "prompts": {"name": "jsonl", "path": str(tmp_path / "data.jsonl")},
            "optimizer": {"lr": 1e-2, "warmup_episodes": 0, "schedule": "constant", "max_grad_norm": 1.0},
            "train": {"episodes": 1, "prompts_per_episode": 2, "train_batch_size": 2, "seed": 3},
            "eval": {"num_prompts": 0},
        },
        output=tmp_path / "run",
    )
    encode, eos = worker.tokenizer.encode, worker.tokenizer.eos_token_id
    rows, count = [], 0
    for line in lines:
        prompt, answer = encode(line["prompt"]), [*encode(line["completion"]), eos]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        rows.append((prompt + answer, weights))
        count += len(answer)
    worker.create("step", AdapterSpec(4, seed=3))
    data = [row(tokens, weights=np.asarray(weights) / count) for tokens, weights in rows]
    _, metrics = worker.forward("step", data, "cross_entropy", {}, True)
    norm, _ = worker.optim_step("step", ADAM)
    worker.save("step", str(tmp_path / "ours"), False)
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["loss:sum"] == pytest.approx(line["loss/policy"], abs=1e-5)
    assert norm == pytest.approx(line["policy/grad_norm"], abs=1e-5)
    ours, theirs = (
        load_file(tmp_path / each)
        for each in ("ours/adapter_model.safetensors", "run/adapter/adapter_model.safetensors")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=0)


def test_the_rank_of_the_slot_does_not_change_the_numbers(worker, base):
    small = Worker(WorkerOptions(base, max_rank=2, device="cpu"))
    for each in (worker, small):
        each.create("rank", AdapterSpec(2, seed=1, mlp=False))
    ours, theirs = steps(worker, "rank"), steps(small, "rank")
    small.close()
    assert [each[0] for each in ours[::2]] == pytest.approx([each[0] for each in theirs[::2]], abs=1e-5)
    for name, value in small.adapters["rank"].weights.items():
        own = worker.adapters["rank"].weights[name]
        torch.testing.assert_close(own[: value.shape[0], : value.shape[1]], value, atol=1e-5, rtol=0)
        assert own.abs().sum() == pytest.approx(float(value.abs().sum()), rel=1e-4)
    up = [value for name, value in worker.adapters["rank"].weights.items() if "mlp" in name]
    assert up
    assert all(not value.any() for value in up)


def test_two_adapters_in_turns_are_what_each_is_alone(worker):
    alone = {}
    for name, seed in (("one", 1), ("two", 2)):
        worker.create(name, AdapterSpec(4, seed=seed))
        alone[name] = steps(worker, name, ROWS[seed - 1 :])
    for name, seed in (("one", 1), ("two", 2)):
        worker.create(name, AdapterSpec(4, seed=seed))
    turns = {"one": [], "two": []}
    for _ in range(3):  # forward, forward, step, step
        for name, rows in (("one", ROWS), ("two", ROWS[1:])):
            outputs, metrics = worker.forward(name, rows, "cross_entropy", {}, True)
            turns[name].append((metrics["loss:sum"], [each["logprobs"].tolist() for each in outputs]))
        for name in turns:
            turns[name].append(worker.optim_step(name, ADAM)[0])
    assert turns == alone  # bit for bit


def test_chunks_are_one_batch(worker):
    worker.create("whole", AdapterSpec(4))
    worker.create("parts", AdapterSpec(4))
    worker.forward("whole", ROWS, "cross_entropy", {}, True)
    for each in ROWS:
        worker.forward("parts", [each], "cross_entropy", {}, True)
    for name, value in worker.adapters["whole"].gradients.items():
        torch.testing.assert_close(worker.adapters["parts"].gradients[name], value, atol=1e-6, rtol=1e-5)


def test_a_checkpoint_continues_with_and_without_the_optimizer(worker, tmp_path):
    worker.create("saved", AdapterSpec(4))
    steps(worker, "saved")
    worker.save("saved", str(tmp_path / "c"), True)
    worker.load("again", str(tmp_path / "c"), True)
    worker.load("fresh", str(tmp_path / "c"), False)
    expected = steps(worker, "saved")
    assert steps(worker, "again") == expected  # bit for bit
    fresh = steps(worker, "fresh")
    assert fresh[0] == expected[0]
    assert fresh[-1] != expected[-1]


def test_several_targets_per_position(worker):
    worker.create("many", AdapterSpec(4))
    ids, targets = np.asarray([5, 6, 7], np.int64), np.asarray([[6, 4], [7, 5], [8, 9]], np.int64)
    weights = np.asarray([[1, 0], [0.5, 0.5], [0, 2]], np.float32)
    several = Row(ids, {"target_tokens": targets, "weights": weights})
    outputs, metrics = worker.forward("many", [several, ROWS[1]], "cross_entropy", {}, False)
    expected = 0.0
    for column in range(2):
        one = Row(ids, {"target_tokens": targets[:, column].copy(), "weights": weights[:, column].copy()})
        (output,), _ = worker.forward("many", [one], "cross_entropy", {}, False)
        np.testing.assert_allclose(outputs[0]["logprobs"][:, column], output["logprobs"], atol=1e-5)
        expected += float(output["elementwise_loss"].sum())
    assert metrics["loss:sum"] == pytest.approx(expected + float(outputs[1]["elementwise_loss"].sum()), abs=1e-4)
    assert not worker.adapters["many"].gradients


def test_peft_loads_the_adapter(worker, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    worker.create("peft", AdapterSpec(4))
    steps(worker, "peft")
    worker.save("peft", str(tmp_path / "adapter"), False)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[0].gather(-1, torch.tensor([[6], [7], [8], [9]]))[:, 0]
    (output,), _ = worker.forward("peft", [row([5, 6, 7, 8, 9], weights=[1] * 4)], "cross_entropy", {}, False)
    np.testing.assert_allclose(output["logprobs"], expected.numpy(), atol=1e-5)
