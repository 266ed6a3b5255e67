"""The value model (a transformer trunk with a scalar head), its loss, and its explained variance."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rlhf_core.algorithm import Mean
from rlhf_core.episode_view import EpisodeView
from rlhf_core.types import Experience
from rlhf_forward import aggregate_sum, mean_over_ranks, value_forward
from rlhf_models import check_hub, is_lora, merged_weights, write_transformers_folder
from rlhf_objective import explained_variance, value_loss
from rlhf_passes import Packing, takes_packed_rows

PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the parameter names of a wrapped model."""
HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """Value of the state after each token: forward returns [B, S] float32.

    The value of the state *before* response token t is read at position P + t - 1, with the same helper that slices
    log-probs (`rlhf_forward.response_logits`). The head is initialized to zero, so a new critic predicts 0 everywhere,
    independent of the seed.
    """

    def __init__(self, trunk: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = nn.utils.skip_init(nn.Linear, hidden_size, 1)  # draws nothing from the global generator
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.value_head.to(next(trunk.parameters()).dtype)
        self._takes_positions = "position_ids" in inspect.signature(type(trunk).forward).parameters

    @classmethod
    def from_pretrained(cls, path_or_model: str | Path | nn.Module, *, dtype: torch.dtype = torch.float32) -> Critic:
        """Create a critic on a copy of a causal LM's trunk, or on the trunk stored in a folder.

        If the model has a LoRA adapter, the copy gets its own adapter and its base stays frozen. A folder written by a
        critic's `save_pretrained` includes the head.

        Args:
            path_or_model: Causal LM to copy, folder, or name on the hub.
            dtype: Parameter type of a trunk that is loaded.

        Raises:
            UserInputError: Neither a folder nor a hub name, a hub that does not answer, or impossible layer counts.
        """
        if isinstance(path_or_model, nn.Module):
            causal_lm: Any = path_or_model
            model = causal_lm.get_base_model() if is_lora(causal_lm) else causal_lm
            trunk = copy.deepcopy(model.base_model)
            return cls(trunk, _hidden_size(trunk.config))
        check_hub(str(path_or_model), where="Critic.from_pretrained")
        trunk = AutoModel.from_pretrained(path_or_model, dtype=dtype, use_safetensors=True)
        critic = cls(trunk, _hidden_size(trunk.config))
        head = Path(path_or_model) / HEAD_FILE
        if head.exists():
            critic.value_head.load_state_dict(load_file(head))
        return critic

    def save_pretrained(self, path: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write trunk and head as safetensors for `from_pretrained`, with any LoRA adapter merged.

        Args:
            path: Folder to write.
            weights: Full state dict to write, if a strategy shards this module. None uses the module's own.
        """
        outer: Any = self.trunk
        inner = outer.get_base_model() if is_lora(outer) else outer
        assert isinstance(inner, PreTrainedModel)
        state = merged_weights(self, dict(self.state_dict() if weights is None else weights))
        trunk = {
            n.removeprefix("trunk.").removeprefix(PEFT_PREFIX): t for n, t in state.items() if n.startswith("trunk.")
        }
        write_transformers_folder(inner, trunk, Path(path))
        head = {n.removeprefix("value_head."): t for n, t in state.items() if n.startswith("value_head.")}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}, Path(path) / HEAD_FILE)

    @property
    def takes_packed_rows(self) -> bool:
        return takes_packed_rows(self.trunk)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Compute the value of the state after each token.

        Args:
            input_ids: [B, S] int64.
            attention_mask: [B, S], 1 for real tokens.
            position_ids: [B, S] int64. Ignored if the trunk does not accept them.
            packing: Layout of the samples in one packed row ([1, S]). Requires `takes_packed_rows`.
            inputs: Other inputs of the trunk.

        Returns:
            Values [B, S] float32.
        """
        options: dict[str, Any] = inputs if packing is None else {"packing": packing, **inputs}
        if self._takes_positions and position_ids is not None:
            options["position_ids"] = position_ids
        output = self.trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)
        hidden: Tensor = output.last_hidden_state
        values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))
        # Copy, because FSDP's backward hook is registered on the output and does not work on a view.
        return values.squeeze(-1).to(torch.float32, copy=True)


def _hidden_size(config: Any) -> int:
    """Width of the hidden states, that of the language model if the config has several."""
    return int(config.get_text_config(decoder=True).hidden_size)


def critic_metrics(episode: Experience, view: EpisodeView, returns: Tensor) -> dict[str, float]:
    """Compute value metrics over all rows of the episode. Collective."""
    assert episode.values is not None
    mask, reduce = episode.action_mask, view.all_reduce
    metrics = {
        "value/mean": float(mean_over_ranks(episode.values, mask, reduce)),
        "returns/mean": float(mean_over_ranks(returns, mask, reduce)),
    }
    explained = explained_variance(episode.values, returns, mask, reduce)
    if explained is not None:
        metrics["value/explained_variance"] = explained
    return metrics


def value_sum(critic: nn.Module, batch: Experience, *, clip_eps: float | None) -> tuple[Tensor, dict[str, Mean]]:
    """Compute the value loss of a micro-batch, summed over tokens, and its metrics."""
    assert batch.values is not None and batch.returns is not None
    mask = batch.action_mask
    result = value_loss(value_forward(critic, batch), batch.values, batch.returns, mask, clip_eps=clip_eps)
    clipped = Mean(result.clipped.sum(), mask.sum())
    return aggregate_sum(result.losses, mask, "token-mean"), {"value/clip_fraction": clipped}
