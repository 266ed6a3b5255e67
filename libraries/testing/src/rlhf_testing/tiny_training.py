"""A tiny model and its training in plain torch, the reference for strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.components import OptimizerContext
from rlhf_core.plugins.selected import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf_core.strategy import Strategy, TrainedModel


NUM_SAMPLES = 8
NUM_TOKENS = 12
SHARD_BYTES = 4096
VOCABULARY = 33
LEARNING_RATE = 3e-4
TINY_RATE = 1e-6
"""Learning rate too small to change most bfloat16 weights."""
MAX_GRAD_NORM = 0.5


def tiny_model(seed: int = 0, *, lora: bool = False, dtype: str = "float32", hidden_size: int = 16) -> nn.Module:
    """Create a causal LM of a few thousand parameters with tied embeddings and odd sizes, so that shards need padding.

    Args:
        seed: Seed of the weights.
        lora: Add a LoRA adapter. Adapters on 16-bit weights are float32.
        dtype: Name of the weights' torch dtype.
        hidden_size: Width of the hidden states, a multiple of 4.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_models.peft_warnings import silence_peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden_size,
                intermediate_size=30,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=True,
            )
        )
        model.to(getattr(torch, dtype))
        if lora:
            silence_peft()
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(
                model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
            )
    return model


class Training:
    """A model under a strategy, and an endless series of updates on data shared by all processes."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        seed: int = 0,
        lora: bool = False,
        checkpointing: bool = False,
        max_grad_norm: float | None = MAX_GRAD_NORM,
        dtype: str = "float32",
        lr: float = LEARNING_RATE,
        optimizer_name: str | None = None,
        hidden_size: int = 16,
    ) -> None:
        import torch

        from rlhf_models.gradient_checkpointing import enable_gradient_checkpointing

        self.strategy = strategy
        model: Any = tiny_model(seed, lora=lora, dtype=dtype, hidden_size=hidden_size)
        if checkpointing:
            model.config.use_cache = False
            enable_gradient_checkpointing(model)
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if optimizer_name is None:
            optimizer = strategy.make_optimizer(trainable.values(), lr=lr, weight_decay=0.1)
        else:
            plugin = load("optimizers", optimizer_name)
            options = plugin.component.config.model_validate({"weight_decay": 0.1})
            optimizer = plugin.build(options, OptimizerContext(parameters=trainable, lr=lr, strategy=strategy))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        self.trained: TrainedModel = strategy.prepare(model, optimizer, scheduler, max_grad_norm=max_grad_norm)
        self.done = 0

    def update(
        self, *, micro_batch: int = 2, shares: Sequence[int] | None = None, num_forwards: int = 1
    ) -> tuple[float, float]:
        """Make one update and return its loss and gradient norm.

        A rank with fewer samples runs empty (fully masked) micro-batches, as in the trainer.

        Args:
            micro_batch: Samples per micro-batch.
            shares: Number of samples of each rank. None is equal shares.
            num_forwards: Forwards per backward, more than one as when pretraining batches are mixed in. Their lengths
                differ, by tokens at the end that the loss does not use.
        """
        import torch

        strategy, model = self.strategy, self.trained.model
        generator = torch.Generator().manual_seed(1000 + self.done)
        samples = torch.randint(0, VOCABULARY, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
        shares = shares or [NUM_SAMPLES // strategy.world_size] * strategy.world_size
        mine = samples[sum(shares[: strategy.rank]) :][: shares[strategy.rank]].to(strategy.device)
        batches = list(mine.split(micro_batch)) if len(mine) else []
        num_micro_batches = max(-(-share // micro_batch) for share in shares)
        total = torch.zeros((), device=strategy.device)
        for index in range(num_micro_batches):
            empty = index >= len(batches)
            ids = samples[:1].to(strategy.device) if empty else batches[index]
            with strategy.accumulate(model, is_last=index == num_micro_batches - 1):
                with strategy.autocast():
                    parts = []
                    for number, part in enumerate(ids.chunk(num_forwards)):
                        logits = model(input_ids=torch.nn.functional.pad(part, (0, number))).logits
                        parts.append(token_loss(logits[:, :NUM_TOKENS], part))
                    loss = torch.stack(parts).sum() * (0.0 if empty else 1.0)
                strategy.backward(loss * strategy.gradient_average_factor, self.trained.optimizer)
            total += loss.detach()
        norm = strategy.step(self.trained)
        self.done += 1
        return float(strategy.all_reduce(total)), norm

    def leave_gradients(self, factor: float = 1.0) -> None:
        """Compute the gradients of a loss times `factor`, without a step."""
        import torch

        model, ids = self.trained.model, torch.zeros(1, 3, dtype=torch.long, device=self.strategy.device)
        with self.strategy.accumulate(model, is_last=True):
            self.strategy.backward(token_loss(model(input_ids=ids).logits, ids) * factor, self.trained.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """All weights, gathered by shard, as copies on the CPU. Checks that each shard contains plain tensors."""
        import torch

        weights = {}
        for shard in self.strategy.state_dict_shards(self.trained.model, SHARD_BYTES):
            for name, tensor in shard.items():
                # In-place operations of a subclass may behave differently (ColossalAI's are out of place).
                assert type(tensor) is torch.Tensor, f"state_dict_shards yielded {name} as {type(tensor).__name__}"
                weights[name] = tensor.cpu().clone()
        return weights

    def save(self, folder: Path) -> None:
        self.strategy.save_model(self.trained.model, folder)
        self.strategy.save_optimizer(self.trained.optimizer, folder)

    def load(self, folder: Path, done: int) -> None:
        """Continue from `save`, called after `done` updates."""
        self.strategy.load_model(self.trained.model, folder)
        self.strategy.load_optimizer(self.trained.optimizer, folder)
        scheduler = self.trained.scheduler
        assert scheduler is not None
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": done, "_step_count": done + 1})
        self.done = done


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Negative log-likelihood of the next tokens, divided by the tokens of all samples of the update."""
    import torch

    log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])
    return -log_probs.sum() / (NUM_SAMPLES * (NUM_TOKENS - 1))


def train_alone(
    *,
    updates: int,
    lora: bool = False,
    max_grad_norm: float | None = MAX_GRAD_NORM,
    dtype: str = "float32",
    lr: float = LEARNING_RATE,
) -> dict[str, Any]:
    """Run the same training in plain torch, the reference for strategies.

    Gradients are cast to float32, AdamW updates float32 copies of the weights ("masters" in the result), and these are
    rounded into the weights. With `dtype` float32 this is plain AdamW.
    """
    import torch

    model = tiny_model(lora=lora, dtype=dtype)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {name: parameter.detach().float().clone() for name, parameter in trainable.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, weight_decay=0.1, foreach=False)
    losses, norms = [], []
    for done in range(updates):
        generator = torch.Generator().manual_seed(1000 + done)
        samples = torch.randint(0, VOCABULARY, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
        loss = token_loss(model(input_ids=samples).logits, samples)
        torch.autograd.backward(loss)
        for name, parameter in trainable.items():
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        optimizer.param_groups[0]["lr"] = lr / (1 + done)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trainable.items():
                parameter.copy_(masters[name])
        model.zero_grad()
        losses.append(float(loss.detach()))
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "masters": masters}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Maximum absolute difference over all tensors of `one`, which must all be in `other`."""
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def moved_fraction(start: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> float:
    """Share of the values of `now` that differ from `start`."""
    num_moved = sum(int((tensor != start[name]).sum()) for name, tensor in now.items())
    return num_moved / sum(tensor.numel() for tensor in now.values())


def change_cosine(
    start: Mapping[str, torch.Tensor], one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> float:
    """Cosine between the changes of `one` and `other` from `start`, over all weights together."""
    import torch

    first = torch.cat([(one[name] - start[name]).flatten() for name in one])
    second = torch.cat([(other[name] - start[name]).flatten() for name in one])
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))
