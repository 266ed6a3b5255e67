"""Two steps of `rlhf train`, against the same steps of the service."""

import json

import numpy as np
import pytest
import torch
import two_ranks
from safetensors.torch import load_file

from rlhf_core import train
from rlhf_core.util.tensor_files import load_tree
from rlhf_serve_training.adapters import AdapterSpec
from rlhf_serve_training.options import WorkerOptions
from rlhf_serve_training.wire import Row
from rlhf_serve_training.worker import Worker
from rlhf_strategies import launch

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
SEED, RANK = 3, 4
EXACT, BF16 = 1e-5, 5e-3


class Batches:
    """A hook that keeps the batches of a run."""

    def __init__(self):
        self.seen = []

    def rlhf_batch_start(self, experience):
        self.seen.append(experience)


def rows_of(items, loss):
    """The API's data of a batch: position i predicts token i + 1, and the loss is a sum, so advantages are divided."""
    count = float(sum(int(item.action_mask.sum()) for item in items))
    rows = []
    for item in items:
        ids = torch.cat([item.prompt_ids, item.response_ids])
        values = {"logprobs": item.action_log_probs, "advantages": item.advantages / count}
        if loss == "gspo":
            values["sequence_ratio_mask"] = item.action_mask
        fields = {"target_tokens": ids[1:].numpy()}
        for name, value in values.items():
            whole = torch.zeros(len(ids))
            whole[len(item.prompt_ids) :] = torch.where(item.action_mask, value.float(), 0.0)
            fields[name] = whole[1:].numpy()
        rows.append(Row(ids[:-1].numpy(), fields))
    return rows


def run_of(base, folder, algorithm, strategy):
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ("12", "9", "34", "7")))
    return {
        "model": {"path": base, "lora": {"r": RANK}},
        "algorithm": algorithm,
        "strategy": {"name": strategy},
        "prompts": {"name": "jsonl", "path": str(folder / "data.jsonl")},
        "rewards": [{"name": "length", "target_tokens": 4}],
        "engine": {"max_new_tokens": 7},
        "optimizer": {"lr": 1e-2, "warmup_episodes": 0, "schedule": "constant", "max_grad_norm": 1.0},
        "train": {
            "episodes": 1,
            "prompts_per_episode": 4,
            "samples_per_prompt": 4,
            "train_batch_size": 8,
            "seed": SEED,
        },
        "eval": {"num_prompts": 0},
    }


def service(base, strategy):
    worker = Worker(
        WorkerOptions(base, strategy=strategy, max_rank=8, device="cpu", max_adapters=1 if strategy == "gemini" else 4)
    )
    worker.create("m", AdapterSpec(RANK, seed=SEED))
    return worker


def compare(worker, folder, measured, near):
    """Losses, norms and the adapter of a service against those of a run."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "policy/grad_norm" in line]
    expected = [(line["loss/policy"], line["policy/grad_norm"]) for line in lines]
    assert np.asarray(measured) == pytest.approx(np.asarray(expected), abs=near, rel=0 if near == EXACT else 1e-2)
    worker.save("m", str(folder / "ours"), False)
    ours, theirs = (load_file(folder / each / "adapter_model.safetensors") for each in ("ours", "run/adapter"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].float(), value.float(), atol=near, rtol=0)


@pytest.mark.parametrize(
    ("strategy", "near"),
    [
        ("single", EXACT),
        pytest.param("low-level-zero", EXACT, marks=pytest.mark.slow),
        pytest.param("gemini", BF16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("loss", "options", "config"),
    [
        ("ppo", {"name": "clip", "clip_eps": 0.1, "clip_eps_high": 0.2}, {"clip_low_threshold": 0.9}),
        ("cispo", {"name": "cispo", "clip_eps": 0.2, "clip_eps_high": 0.2}, {}),
        ("gspo", {"name": "gspo", "clip_eps": 0.2, "clip_eps_high": 0.2}, {}),
    ],
)
def test_two_steps_of_a_policy_loss(base, tmp_path, loss, options, config, strategy, near):
    batches = Batches()
    algorithm = {"name": "grpo", "policy_loss": options, "kl_coef": 0.0}
    train(run_of(base, tmp_path, algorithm, strategy), output=tmp_path / "run", hooks=[batches])
    assert len(batches.seen) == 2
    worker = service(base, strategy)
    measured = []
    for items in batches.seen:
        _, metrics = worker.forward("m", rows_of(items, loss), loss, config, True)
        measured.append((metrics["loss:sum"], worker.optim_step("m", ADAM)[0]))
    compare(worker, tmp_path, measured, near)
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "torch-ddp", "ddp"])
def test_two_ranks_make_the_steps_of_two_ranks_of_rlhf_train(base, tmp_path, strategy):
    """Losses, norms, Adam's moments of the gradients, and weights."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in two_ranks.LINES))
    launch("two_ranks:make_steps", 2, arguments=[base, str(tmp_path), strategy])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    expected = [(line["loss/policy"], line["policy/grad_norm"]) for line in lines if "policy/grad_norm" in line]
    assert np.asarray(json.loads((tmp_path / "ours.json").read_text())) == pytest.approx(
        np.asarray(expected), abs=EXACT
    )
    ours, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "run/adapter"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=EXACT, rtol=0)
    moments = load_file(tmp_path / "ours" / "adam.safetensors")
    (optimizer,) = max((tmp_path / "run/checkpoints").iterdir()).rglob("optimizer.safetensors")
    state = load_tree(optimizer)["state"]
    assert len(moments) == 2 * len(state)
    for name, values in state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(moments[f"{key}:{name}"], values[key], atol=EXACT, rtol=1e-4)
