"""Options of learning from samples as columns of values, and tiny runs with one value of each column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

REWARD = Path(__file__).with_name("digit_reward.py")
PLAIN: dict[str, Any] = {}
LORA = {"r": 4}
SHARDING = ("fsdp", "low-level-zero", "gemini")


class Files(NamedTuple):
    """What some options refer to."""

    records: Path
    reward_model: Path
    teacher: Path
    """A model with other tokens than the policy's."""
    recorded: Path
    """A run with the tokens that it sampled."""
    server: str
    """Address of a model that scores tokens."""


def columns_of(files: Files) -> dict[str, dict[str, dict[str, Any]]]:
    """Column -> value -> the changes of the run file: section -> options."""
    own = {"policy": "current", "context": "{answer},{prompt}"}
    named = {"own": {**own, "policy": "start"}, "model": {"path": "builtin:tiny-digits"}}
    weights: dict[str, dict[str, Any]] = {
        "all-weights": PLAIN,
        "rslora": {"lora": {**LORA, "rslora": True}},
        "dora": {"lora": {**LORA, "dora": True}},
        "pissa": {"lora": {**LORA, "init": "pissa"}},
        "olora": {"lora": {**LORA, "init": "olora"}},
        "nf4": {"lora": LORA, "quantize": "nf4"},
        "int8": {"lora": LORA, "quantize": "int8"},
    }
    refreshed = {"kl_coef": 0.1, "reference_every": 1}
    sources = {"imitation": {"coef": 0.1}, "preference": {"coef": 0.1}, "records": {"path": str(files.records)}}
    algorithms: dict[str, dict[str, Any]] = {
        "critic-warmup": {"name": "ppo", "critic_warmup_episodes": 1},
        "critic-path": {"name": "ppo", "critic": {"path": str(files.reward_model)}, "lam_alpha": 0.5},
        "kl-ratio": {"name": "ppo", "kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "kl_ratio": True},
        "refresh": {"name": "ppo", **refreshed},
        "average": {"name": "grpo", **refreshed, "reference_mix": 0.5},
        "sources": {"name": "grpo", **sources},
        "rejection": {"name": "rejection-sampling"},
        "online-dpo": {"name": "online-dpo"},
        "optimal-token": {"name": "grpo", "advantage": "optimal-token"},
        "max-likelihood": {"name": "grpo", "advantage": "max-likelihood"},
        "length-weighted": {"name": "grpo", "advantage": "length-weighted"},
        "own-context": {"name": "distill", "teacher": own, "top_k": 4},
        "teachers": {"name": "distill", "teachers": named, "teacher_key": "teacher"},
        "other-tokens": {"name": "distill", "teacher": {"path": str(files.teacher), "tokenizer": str(files.teacher)}},
        "teacher-server": {"name": "distill", "teacher": {"server": {"url": files.server, "model": "tiny"}}},
    }
    optimizers = {"adamw": PLAIN, "muon": {"name": "muon"}, "adamw-8bit": {"name": "adamw-8bit"}}
    schedules: dict[str, Any] = {
        "constant": "constant",
        "wsd": {"name": "wsd", "decay": 0.5},
        "floor": {"name": "cosine", "floor": 0.1},
    }
    engines = {
        "plain": PLAIN,
        "min-p": {"min_p": 0.05},
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        "banned-words": {"banned_words": ["7"]},
    }
    return {
        "algorithm": {name: {"algorithm": each} for name, each in algorithms.items()},
        "weights": {name: {"model": each} for name, each in weights.items()},
        "strategy": {name: {"strategy": {"name": name}} for name in ("single", "torch-ddp", "ddp", *SHARDING)},
        "sampling": {
            **{name: {"engine": each} for name, each in engines.items()},
            "per-prompt": {"prompts": {"sampling": {"temperature": "heat"}}},
        },
        "transport": {"local": PLAIN, "ray": {"transport": {"name": "ray", "max_staleness": 0}}},
        "optimizer": {name: {"optimizer": each} for name, each in optimizers.items()},
        "schedule": {name: {"optimizer": {"schedule": each}} for name, each in schedules.items()},
        "part": {
            "none": PLAIN,
            "monitor": {"hooks": {"hacking-monitor": {"falls": ["reward/sorted_fraction"]}}},
            "replay": {"player": {"replay": str(files.recorded)}},
        },
    }


EXCLUDED: dict[tuple[str, str], str] = {
    **{
        (option, weights): r"algorithm\.reference_every: the reference of model\.lora is the policy without its adapter"
        for option in ("refresh", "average")
        for weights in ("rslora", "dora", "pissa", "olora", "nf4", "int8")
    },
    **{
        (option, strategy): rf"algorithm\.reference_every: strategy {strategy} shards its models"
        for option in ("refresh", "average")
        for strategy in ("fsdp", "gemini")
    },
    **{
        (option, "ray"): r"algorithm\.reference_every: over ray each maker has its own reference"
        for option in ("refresh", "average")
    },
    **{
        (weights, strategy): rf"strategy\.name: {strategy} cannot divide or rewrite the {weights} weights"
        for weights in ("nf4", "int8")
        for strategy in SHARDING
    },
    **{
        (optimizer, strategy): rf"optimizer\.name: strategy {strategy} supports only adamw, not {optimizer}"
        for optimizer in ("muon", "adamw-8bit")
        for strategy in ("low-level-zero", "gemini")
    },
    **{
        (teacher, sampling): rf"algorithm\.teacher: .* whole distribution, but engine\.{option} changes the policy's"
        for teacher in ("other-tokens", "teacher-server")
        for sampling, option in {
            "min-p": "min_p",
            "penalties": "repetition_penalty",
            "banned-words": "banned_words",
        }.items()
    },
    **{
        (teacher, "per-prompt"): r"algorithm\.teacher: .* one temperature, but prompts\.sampling sets others"
        for teacher in ("other-tokens", "teacher-server")
    },
    ("per-prompt", "replay"): r"player\.replay: prompts\.sampling sets options of new answers",
    ("adamw-8bit", "fsdp"): r"optimizer\.name: adamw-8bit keeps its state in blocks, which fsdp cannot shard",
}
"""Two values that are refused together -> the message, with the option's name."""


def excludes(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two choices are refused together."""
    return (one[1], other[1]) in EXCLUDED or (other[1], one[1]) in EXCLUDED


def run_file(files: Files, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the changes of a run of two episodes, the second of which has a refreshed reference and a warm critic."""
    run: dict[str, Any] = {
        "prompts": {"name": "jsonl", "path": str(files.records), "max_prompt_tokens": 16},
        "rewards": [{"name": f"{REWARD}:sorted_fraction"}],
        "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 4, "train_batch_size": 16},
        "optimizer": {"lr": 1e-3},
    }
    columns = columns_of(files)
    for column, value in chosen.items():
        for section, options in columns[column][value].items():
            run[section] = {**run.get(section, {}), **options}
    return run


def write_records(path: Path) -> None:
    """Write prompts with answers, temperatures and the names of their teachers."""
    lines = [
        {
            "prompt": f"{digits}>",
            "answer": "".join(sorted(digits)),
            "completion": "".join(sorted(digits)),
            "heat": (0.8, 1.2)[place % 2],
            "teacher": ("own", "model")[place % 2],
        }
        for place, digits in enumerate(f"{number * 37 % 1000:03}" for number in range(24))
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
