"""The plugins of this project by name, for telling a user what to install."""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[str, Mapping[str, str]] = {
    "algorithms": {
        "ppo": "rlhf-ppo",
        "distill": "rlhf-distill",
        "grpo": "rlhf-group",
        "rloo": "rlhf-group",
        "reinforce++": "rlhf-group",
        "sft": "rlhf-offline",
        "reward-model": "rlhf-offline",
        "process-reward-model": "rlhf-offline",
        "dpo": "rlhf-offline",
        "kto": "rlhf-offline",
        "orpo": "rlhf-offline",
        "simpo": "rlhf-offline",
    },
    "strategies": {
        "single": "rlhf-torch",
        "fsdp": "rlhf-torch",
        "ddp": "rlhf-colossalai",
        "gemini": "rlhf-colossalai",
        "low-level-zero": "rlhf-colossalai",
    },
    "rewards": {
        "exact-match": "rlhf-reward-rules",
        "regex": "rlhf-reward-rules",
        "length": "rlhf-reward-rules",
        "model": "rlhf-reward-model",
        "http": "rlhf-reward-http",
        "judge": "rlhf-reward-judge",
        "reasoning-gym": "rlhf-reasoning-gym",
    },
    "transports": {"local": "rlhf-core", "ray": "rlhf-ray"},
    "engines": {"hf": "rlhf-hf", "vllm": "rlhf-vllm"},
    "prompts": {
        "jsonl": "rlhf-core",
        "hf-dataset": "rlhf-core",
        "sort-digits": "rlhf-core",
        "guess-number": "rlhf-environments",
        "reasoning-gym": "rlhf-reasoning-gym",
        "tasks": "rlhf-core",
    },
    "environments": {
        "guess-number": "rlhf-environments",
        "tools": "rlhf-environments",
        "conversation": "rlhf-environments",
        "gymnasium": "rlhf-gymnasium",
        "mcp": "rlhf-mcp",
        "openenv": "rlhf-openenv",
        "verifiers": "rlhf-env-verifiers",
    },
    "hooks": {"early-stop": "rlhf-core", "profiler": "rlhf-profiler"},
    "loggers": {
        "tensorboard": "rlhf-loggers",
        "wandb": "rlhf-loggers",
        "csv": "rlhf-loggers",
        "mlflow": "rlhf-logger-mlflow",
        "trackio": "rlhf-logger-trackio",
    },
    "advantages": {
        "group-normalised": "rlhf-group",
        "group-whitened": "rlhf-group",
        "leave-one-out": "rlhf-group",
        "reward-to-go": "rlhf-group",
        "gdpo": "rlhf-group",
        "pass-at-k": "rlhf-group",
    },
    "policy_losses": {
        "clip": "rlhf-core",
        "gspo": "rlhf-group",
        "cispo": "rlhf-group",
        "sapo": "rlhf-group",
        "gmpo": "rlhf-group",
        "dppo": "rlhf-group",
        "clip-cov": "rlhf-group",
        "kl-cov": "rlhf-group",
    },
    "endpoints": {"openai": "rlhf-serve"},
    "commands": {
        "dashboard": "rlhf-dashboard",
        "ray": "rlhf-ray",
        "serve": "rlhf-serve",
        "serve-reward": "rlhf-reward-http",
    },
}
"""Distribution that brings each plugin of this project: only for telling a user what to install."""
