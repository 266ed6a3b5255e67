"""A critic that starts from a folder: a reward model, a causal LM, or an earlier critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_core.errors import UserInputError
from rlhf_models import check_hub

from .critic import Critic

WHERE = "algorithm.critic.path"


def load_critic(path: str, *, policy: nn.Module) -> Critic:
    """Load a critic. The head of a reward model becomes the value head. A causal LM gets a new head, which is 0.

    The critic is trained whole, even if the policy has an adapter.

    Args:
        path: Folder or hub name of a reward model with one label, of a causal LM, or of a critic's `save_pretrained`.
        policy: The policy, whose tokens the critic must know.

    Returns:
        The critic, in the type of the policy's parameters.

    Raises:
        UserInputError: The model is not found, has several labels, or has fewer tokens than the policy.
    """
    check_hub(path, where=WHERE)
    dtype = next(policy.parameters()).dtype
    names = getattr(AutoConfig.from_pretrained(path), "architectures", None) or ()
    if any(name.endswith("ForSequenceClassification") for name in names):
        critic = _of_reward_model(path, dtype)
    else:
        critic = Critic.from_pretrained(path, dtype=dtype)
    trunk: Any = critic.trunk
    outer: Any = policy
    known, needed = (model.get_input_embeddings().weight.shape[0] for model in (trunk, outer))
    if known < needed:
        raise UserInputError(
            f"knows {known} tokens, but the policy has {needed}", where=WHERE, hint="use a model with its tokenizer"
        )
    return critic


def _of_reward_model(path: str, dtype: torch.dtype) -> Critic:
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, use_safetensors=True)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        found = f"{head.out_features} labels" if isinstance(head, nn.Linear) else "no linear layer `score`"
        raise UserInputError(f"has {found}, not one score", where=WHERE, hint="use a reward model with one label")
    critic = Critic(model.base_model, head.in_features)
    with torch.no_grad():
        critic.value_head.weight.copy_(head.weight)
        if head.bias is not None:
            critic.value_head.bias.copy_(head.bias)
    return critic
