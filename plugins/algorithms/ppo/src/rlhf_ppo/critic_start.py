"""A critic that starts from a folder: a reward model, a causal LM, or an earlier critic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.models import model_kind_for
from rlhf_models import disable_dropout

from .critic import HEAD_FILE, Critic

WHERE = "algorithm.critic.path"


class CriticStart:
    """Checks and loads the critic of `critic.path`, which is trained whole, even if the policy has an adapter."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        """Check the path without loading weights.

        Args:
            path: Folder or hub name of a reward model with one label, of a causal LM, or of a critic's
                `save_pretrained`.
            tokenizer: The policy's tokenizer.

        Raises:
            UserInputError: The path is not a model, or its tokens differ from the policy's.
        """
        self._path, self._tokenizer = path, tokenizer
        self._is_critic = (Path(path) / HEAD_FILE).exists()
        if not self._is_critic:
            with _about_the_critic():
                kind = model_kind_for(ModelConfig(path=path))
                kind.check()
                kind.check_tokens(tokenizer)

    def load(self, policy: nn.Module) -> Critic:
        """Load the critic. The head of a reward model becomes the value head. A causal LM gets a new head, which is 0.

        Args:
            policy: The policy, whose type and gradient checkpointing the critic gets.

        Returns:
            The critic.

        Raises:
            UserInputError: The model cannot be loaded, has several labels, or has fewer tokens than the policy.
        """
        model: Any = policy
        dtype = model.get_input_embeddings().weight.dtype
        if self._is_critic:
            critic = Critic.from_pretrained(self._path, dtype=dtype)
            trunk: Any = critic.trunk
            disable_dropout(trunk)
            if (known := trunk.get_input_embeddings().num_embeddings) < len(self._tokenizer):
                problem = f"knows {known} tokens, but the policy's tokenizer has {len(self._tokenizer)}"
                raise UserInputError(problem, where=WHERE, hint="use a critic of this policy")
            return critic
        is_checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
        config = ModelConfig(path=self._path, gradient_checkpointing=is_checkpointing)
        with _about_the_critic():
            kind = model_kind_for(config, "sequence-classification")
            scoring: Any = kind.load_policy(dtype=dtype, seed=0, tokenizer=self._tokenizer)
        head = getattr(scoring, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            found = f"{head.out_features} labels" if isinstance(head, nn.Linear) else "no linear layer `score`"
            raise UserInputError(f"has {found}, not one score", where=WHERE, hint="use a reward model with one label")
        critic = Critic(scoring.base_model, head.in_features)
        with torch.no_grad():
            critic.value_head.weight.copy_(head.weight)
            if head.bias is not None:
                critic.value_head.bias.copy_(head.bias)
        return critic


@contextmanager
def _about_the_critic() -> Iterator[None]:
    """Context whose errors name the option `critic.path`."""
    try:
        yield
    except UserInputError as error:
        raise UserInputError(error.message, where=WHERE, hint=error.hint) from error
