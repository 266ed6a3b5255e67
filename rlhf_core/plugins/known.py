"""The plugins of this project by name, for telling a user what to install."""

from __future__ import annotations

from collections.abc import Mapping

_BROUGHT: Mapping[str, Mapping[str, str]] = {
    "rlhf-ppo": {"algorithms": "ppo"},
    "rlhf-distill": {"algorithms": "distill"},
    "rlhf-group": {
        "algorithms": "grpo rloo reinforce++",
        "advantages": "group-normalised group-whitened leave-one-out reward-to-go gdpo pass-at-k remax",
        "policy_losses": "gspo cispo sapo gmpo dppo clip-cov kl-cov",
    },
    "rlhf-offline": {"algorithms": "sft reward-model process-reward-model dpo kto orpo simpo"},
    "rlhf-torch": {"strategies": "single fsdp"},
    "rlhf-colossalai": {"strategies": "ddp gemini low-level-zero"},
    "rlhf-reward-rules": {
        "rewards": "exact-match regex length format-tags json-schema math-equivalence overlong-penalty "
        "repetition-penalty code-execution"
    },
    "rlhf-reward-model": {"rewards": "model"},
    "rlhf-reward-http": {"rewards": "http", "commands": "serve-reward"},
    "rlhf-reward-judge": {"rewards": "judge"},
    "rlhf-data": {"prompts": "hf-dataset mixture sort-digits", "sections": "prompts.curriculum"},
    "rlhf-reasoning-gym": {"rewards": "reasoning-gym", "prompts": "reasoning-gym"},
    "rlhf-core": {
        "transports": "local",
        "prompts": "jsonl tasks",
        "optimizers": "adamw",
        "schedules": "constant linear cosine",
        "models": "causal-lm sequence-classification",
    },
    "rlhf-containment": {"reward_callers": "isolate cache"},
    "rlhf-episodes": {"sections": "environment"},
    "rlhf-objective": {"policy_losses": "clip"},
    "rlhf-ray": {"transports": "ray", "commands": "ray"},
    "rlhf-hf": {"engines": "hf"},
    "rlhf-vllm": {"engines": "vllm"},
    "rlhf-environments": {"prompts": "guess-number", "environments": "guess-number tools conversation"},
    "rlhf-gymnasium": {"environments": "gymnasium"},
    "rlhf-mcp": {"environments": "mcp"},
    "rlhf-openenv": {"environments": "openenv"},
    "rlhf-env-verifiers": {"environments": "verifiers"},
    "rlhf-control": {"hooks": "control", "commands": "control"},
    "rlhf-guards": {"hooks": "early-stop guards", "sections": "guards"},
    "rlhf-profiler": {"hooks": "profiler"},
    "rlhf-loggers": {"loggers": "tensorboard wandb csv"},
    "rlhf-logger-mlflow": {"loggers": "mlflow"},
    "rlhf-logger-trackio": {"loggers": "trackio"},
    "rlhf-serve": {"endpoints": "openai", "commands": "serve"},
    "rlhf-dashboard": {"commands": "dashboard"},
    "rlhf-export": {"commands": "export"},
    "rlhf-plan": {"commands": "plan", "hooks": "performance"},
    "rlhf-start": {"quickstarts": "default"},
    "rlhf-report": {"commands": "report samples", "hooks": "report"},
}
"""Distribution -> kind -> names, with blanks between."""

KNOWN: dict[str, dict[str, str]] = {}
"""Kind -> name -> the distribution that brings it."""
for _home, _kinds in _BROUGHT.items():
    for _kind, _names in _kinds.items():
        KNOWN.setdefault(_kind, {}).update(dict.fromkeys(_names.split(), _home))
