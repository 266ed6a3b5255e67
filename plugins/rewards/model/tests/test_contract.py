"""The reward `model`, on a tiny reward model, keeps the contract of rewards."""

import torch
from tiny_reward_models import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf_testing.contracts import RewardContract


class TestModel(RewardContract):
    plugin = "model"

    @classmethod
    def make_options(cls, folder):
        tokenizer = make_tokenizer()
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, max_position_embeddings=4096)
            LlamaForSequenceClassification(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {"path": str(folder)}
