"""The kind of model: a small Llama whose input includes the share of different tokens in its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from rlhf_core import Column
from rlhf_models import CausalLM, quiet_progress

from .config import VARIED_PATH, VARIED_TYPE


class VariedConfig(LlamaConfig):
    """A saved `config.json` has its `model_type`, which the component claims."""

    model_type = VARIED_TYPE


class VariedTrunk(LlamaModel):
    """Adds a learned direction, times the variety of the prompt, to each embedding."""

    def __init__(self, config: VariedConfig) -> None:
        super().__init__(config)
        self.direction = nn.Linear(1, config.hidden_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, inputs_embeds: None = None, variety: Tensor | None = None, **options: Any
    ) -> Any:
        """Run the trunk. variety: the kind's column, [B]. None in the tests of a model before a run."""
        embedded = self.embed_tokens(input_ids)
        if variety is not None:
            embedded = embedded + self.direction(variety[:, None].to(embedded.dtype))[:, None]
        return super().forward(inputs_embeds=embedded, **options)


class VariedLM(LlamaForCausalLM):
    """A causal LM that passes `variety` on to its trunk."""

    config_class = VariedConfig

    def __init__(self, config: VariedConfig) -> None:
        super().__init__(config)
        self.model = VariedTrunk(config)
        self.post_init()


class Varied(CausalLM):
    """`builtin:varied-digits` is created here, with the tokens of `builtin:tiny-digits`. Saved models are loaded."""

    columns: Mapping[str, Column] = {"variety": Column(per="prompt", model_input=True)}

    @property
    def is_new(self) -> bool:
        return self.model.path == VARIED_PATH

    def check(self) -> None:
        if not self.is_new:
            super().check()

    def load_tokenizer(self) -> Any:
        path = "builtin:tiny-digits" if self.is_new else self.model.path
        return CausalLM(model=self.model.model_copy(update={"path": path})).load_tokenizer()

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: Any) -> VariedLM:
        if not self.is_new:
            with quiet_progress():
                return VariedLM.from_pretrained(self.model.path, dtype=dtype)
        sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return VariedLM(VariedConfig(**sizes, **tokens, max_position_embeddings=512)).to(dtype)

    def encode(self, record: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Return the prompt's ids and its column: the share of different tokens."""
        return prompt_ids, {"variety": len(set(prompt_ids)) / len(prompt_ids)}
