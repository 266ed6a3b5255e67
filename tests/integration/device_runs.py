"""The process that `test_other_device.py` looks at: tiny runs on a device that is not the CPU, some with a fault."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import other_device
import torch
from running import without_report

from rlhf_core import train
from rlhf_forward import policy_forward
from rlhf_forward.forward import PolicyOutput
from rlhf_hf import paths
from rlhf_hf.forward import ModelForward
from rlhf_testing.models import save_tiny_model, tiny_classifier, tiny_tokenizer
from rlhf_testing.runs import tiny_run

LORA = {"r": 2, "dropout": 0.1}
SCORES = {"rewards": []}
"""A model that gives scores writes no answers that a reward could judge."""
STEPS = {"prompts": {"name": "jsonl", "max_prompt_tokens": 16}}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": {"name": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01}, "rewards": ["neural"]},
    "ppo-lora": {"algorithm": {"name": "ppo", "kl_coef": 0.1}, "model": {"lora": LORA}},
    "grpo": {"algorithm": {"name": "grpo", "kl_coef": 0.1, "kl_in": "loss", "importance_cap": 2.0}},
    "grpo-in-parts": {
        "algorithm": {"name": "grpo", "policy_loss": "gspo", "kl_coef": 0.1},
        "model": {"gradient_checkpointing": True, "offload_reference": True},
        "train": {"micro_batch_tokens": 8},
        "engine": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["1"]},
        "eval": {"every_episodes": 1, "num_prompts": 2, "samples_per_prompt": 2},
    },
    "rloo": {"algorithm": {"name": "rloo", "kl_coef": 0.1}},
    "reinforce++": {"algorithm": {"name": "reinforce++", "entropy_coef": 0.01}},
    "rejection-sampling": {
        "algorithm": {"name": "rejection-sampling", "imitation": {"best": 1}},
        "rewards": ["neural"],
    },
    "online-dpo": {"algorithm": {"name": "online-dpo"}, "rewards": ["neural"]},
    "distill": {"algorithm": {"name": "distill", "top_k": 4, "teacher": {"offload": True}}},
    "environment": {
        "algorithm": {"name": "grpo"},
        "environment": {"name": "guess-number", "max_turns": 2, "numbers": 999},
    },
    "sft": {"algorithm": {"name": "sft", "packing": True, "max_tokens": 24}},
    "sft-lora": {"algorithm": {"name": "sft"}, "model": {"lora": LORA}},
    "dpo": {"algorithm": {"name": "dpo"}, "model": {"offload_reference": True}},
    "dpo-lora": {"algorithm": {"name": "dpo"}, "model": {"lora": LORA}},
    "kto": {"algorithm": {"name": "kto"}},
    "orpo": {"algorithm": {"name": "orpo"}},
    "simpo": {"algorithm": {"name": "simpo"}},
    "reward-model": {"algorithm": {"name": "reward-model", "centring_coef": 0.01}, **SCORES},
    "process-reward-model": {"algorithm": {"name": "process-reward-model", "step_separator": ","}, **SCORES, **STEPS},
}
"""Every algorithm that the repository registers, by itself and with what puts more tensors somewhere."""
QUICK = ("ppo", "grpo-in-parts", "environment", "sft-lora", "dpo-lora", "process-reward-model")
"""In `make test`: a critic, parts of batches, episodes, each kind of dataset and of adapter."""
RESUMED = ("ppo", "sft-lora", "moments-stay-on-the-cpu")
PATHS = ("padded", "equal", "recompute")
"""How the engine generates where a model or a device cannot do its fastest, `slots`."""


def batch_is_not_moved() -> AbstractContextManager[Any]:
    """A missing `.to(device)` before the forward pass of an update."""
    return mock.patch("rlhf_core.training.updater.to_device", lambda batch, device: batch)


def reference_batch_is_not_moved() -> AbstractContextManager[Any]:
    """A missing `.to(device)` before the forward pass of the reference."""
    return mock.patch("rlhf_core.models.passes.to_device", lambda batch, device: batch)


def log_probs_return_to_the_cpu() -> AbstractContextManager[Any]:
    """A `.cpu()` between the forward pass and the loss."""

    def forward(*args: Any, **options: Any) -> PolicyOutput:
        output = policy_forward(*args, **options)
        return replace(output, log_probs=output.log_probs.cpu())

    return mock.patch("rlhf_objective.policy.policy_forward", forward)


def moments_stay_on_the_cpu() -> AbstractContextManager[Any]:
    """A missing `.to(device)` where a checkpoint is read."""
    return mock.patch("rlhf_strategies.base.local_part", lambda like, value: value)


def engine_feeds_from_the_cpu() -> AbstractContextManager[Any]:
    """A device that is not asked of the model, in the engine."""
    return mock.patch("rlhf_hf.forward.ModelForward.device", torch.device("cpu"))


FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "batch-is-not-moved": ("grpo", batch_is_not_moved),
    "reference-batch-is-not-moved": ("grpo", reference_batch_is_not_moved),
    "log-probs-return-to-the-cpu": ("grpo", log_probs_return_to_the_cpu),
    "moments-stay-on-the-cpu": ("sft", moments_stay_on_the_cpu),
    "engine-feeds-from-the-cpu": ("grpo", engine_feeds_from_the_cpu),
}
"""A planted fault -> the run it is planted in."""


def make_runs(out: Path, names: Sequence[str]) -> None:
    """Write `<run>.json` for each: what it raised (None: nothing), how it generated, what `DEVICE` computed."""
    other_device.register()
    torch.set_num_threads(1)
    without_report()
    save_inputs(out)
    for name in names:
        if name in PATHS:
            _record(out, name, RUNS["rloo"], path=name)
        elif name in FAULTS:
            run, planted = FAULTS[name]
            with planted():
                _record(out, name, RUNS[run])
        else:
            _record(out, name, RUNS[name])


def save_inputs(out: Path) -> None:
    """Write the models and prompts of all runs."""
    save_tiny_model(out / "policy")
    save_tiny_model(out / "teacher", seed=1)
    tiny_classifier().save_pretrained(out / "judge")
    tiny_tokenizer().save_pretrained(out / "judge")
    line = json.dumps({"prompt": "312>", "steps": ["1", "23"], "labels": [True, False]})
    (out / "steps.jsonl").write_text(f"{line}\n" * 8)


def _record(out: Path, name: str, changes: Mapping[str, Any], path: str | None = None) -> None:
    taken: list[str] = []

    def choose(forward: ModelForward) -> paths.Path:
        found = paths.choose_path(forward) if path is None else paths.Path(path)  # type: ignore[arg-type]  # one of PATHS
        taken.append("; ".join([found.name, *found.reasons]))
        return found

    other_device.computed.clear()
    error = None
    try:
        with (
            mock.patch("rlhf_strategies.base.resolve_device", lambda name, local_rank=0: other_device.DEVICE),
            mock.patch("rlhf_reward_model.loading.resolve_device", lambda name, local_rank=0: other_device.DEVICE),
            mock.patch("rlhf_hf.engine.choose_path", choose),
            other_device.usable(),
        ):
            run_once(out, name, changes)
    except Exception:
        error = traceback.format_exc()
    told = {"error": error, "paths": taken, "computed": sorted(other_device.computed)}
    (out / f"{name}.json").write_text(json.dumps(told))


def run_once(out: Path, name: str, changes: Mapping[str, Any], folder: str | None = None) -> None:
    """One episode in `out / folder` (by default `name`), and for some another one that goes on from its checkpoint."""
    run = tiny_run(changes)
    run["train"] |= {"episodes": 1, "prompts_per_episode": 2}
    run["engine"] |= {"max_new_tokens": 3}
    run["model"] |= {"path": str(out / "policy"), "device": "auto"}
    if changes["algorithm"]["name"] == "distill":
        run["algorithm"]["teacher"] |= {"path": str(out / "teacher")}
    if run["rewards"] == ["neural"]:
        run["rewards"] = [{"name": "model", "path": str(out / "judge")}]
    if run["prompts"]["name"] == "jsonl":
        run["prompts"]["path"] = str(out / "steps.jsonl")
    train(run, output=out / (folder or name))
    if name in RESUMED:
        run["train"]["episodes"] = 2
        train(run, output=out / (folder or name), resume="auto")
