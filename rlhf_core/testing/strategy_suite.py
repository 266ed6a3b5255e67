"""What every strategy must do, run in real processes: for the authors of strategy plugins.

`run_strategies(cases, num_processes, folder)` starts the processes once, puts each case through the same small
training, and returns what was seen; the tests of a plugin compare it with `train_alone(...)`, plain AdamW in
this process. Losses are sums over 8 samples divided by all their tokens, whatever the split, so the numbers of
any strategy, number of processes and micro-batch size must agree.
"""

from __future__ import annotations

import importlib
import itertools
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.components import StrategyContext
from rlhf_core.errors import DivergenceError
from rlhf_core.strategy import Strategy, Trained
from rlhf_core.tensor_files import load_tree, save_tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

NUM_SAMPLES = 8
NUM_TOKENS = 12
VOCABULARY = 33
SHARD_BYTES = 4096
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 0.5
_START_SECONDS = 600.0


@dataclass(frozen=True)
class StrategyCase:
    """One strategy with its options, importable by name from a fresh process."""

    name: str
    build: str
    """`module:attr` of `build(config, context)`."""
    config: str
    """`module:attr` of the pydantic model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def make(self) -> Strategy:
        """The strategy, in this process."""
        strategy = _load(self.build)(_load(self.config)(**self.options), StrategyContext(device=self.device))
        assert isinstance(strategy, Strategy)
        return strategy


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def tiny_model(seed: int = 0, *, lora: bool = False) -> nn.Module:
    """A causal LM of some thousand parameters: tied embeddings, odd sizes (shards need padding), fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=30,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                tie_word_embeddings=True,
            )
        )
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


class Training:
    """A model under a strategy, and an endless series of updates on data that every process knows."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        seed: int = 0,
        lora: bool = False,
        checkpointing: bool = False,
        max_grad_norm: float | None = MAX_GRAD_NORM,
    ) -> None:
        import torch

        self.strategy = strategy
        model: Any = tiny_model(seed, lora=lora)
        if checkpointing:
            model.config.use_cache = False
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = strategy.make_optimizer(trainable, lr=LEARNING_RATE, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        self.trained: Trained = strategy.prepare(model, optimizer, scheduler, max_grad_norm=max_grad_norm)
        self.done = 0

    def update(
        self, *, micro_batch: int = 2, shares: Sequence[int] | None = None, num_forwards: int = 1
    ) -> tuple[float, float]:
        """One update; loss and gradient norm. `shares` gives each rank's number of samples (default: equal).

        A rank with fewer samples runs empty (wholly masked) micro-batches, as the trainer does. With several
        `num_forwards`, one backward goes through as many forwards, as where pretraining batches are mixed in.
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
                    parts = [token_loss(model(input_ids=part).logits, part) for part in ids.chunk(num_forwards)]
                    loss = torch.stack(parts).sum() * (0.0 if empty else 1.0)
                strategy.backward(loss * strategy.gradient_average_factor, self.trained.optimizer)
            total += loss.detach()
        norm = strategy.step(self.trained)
        self.done += 1
        return float(strategy.all_reduce(total)), norm

    def weights(self) -> dict[str, Tensor]:
        """All weights, gathered shard by shard; copies on the CPU."""
        shards = self.strategy.state_dict_shards(self.trained.model, SHARD_BYTES)
        return {name: tensor.detach().cpu().clone() for shard in shards for name, tensor in shard.items()}

    def save(self, folder: Path) -> None:
        self.strategy.save_model(self.trained.model, folder)
        self.strategy.save_optimizer(self.trained.optimizer, folder)

    def load(self, folder: Path, done: int) -> None:
        """Continue from `save`, made after `done` updates."""
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


def observe(strategy: Strategy, folder: Path) -> dict[str, Any]:
    """Put a strategy (already set up) through everything; collective. The result is the same on every rank."""
    import torch

    seen: dict[str, Any] = {}
    seen["whole"] = _updates(Training(strategy), [{"micro_batch": 4}] * 3)
    training = Training(strategy)
    with torch.no_grad():  # log-probs are taken before the first update
        training.trained.model(input_ids=torch.zeros(1, 3, dtype=torch.long, device=strategy.device))
    seen["accumulated"] = _updates(training, [{"micro_batch": 2}] * 3)
    if strategy.world_size == 2:
        seen["ragged"] = _updates(Training(strategy), [{"shares": [6, 2]}, {"shares": [0, 8]}, {"shares": [3, 5]}])
    seen["two_forwards"] = _updates(Training(strategy), [{"num_forwards": 2}] * 3)
    seen["checkpointing"] = _updates(Training(strategy, checkpointing=True), [{"micro_batch": 4}] * 3)
    seen["unclipped"] = _updates(Training(strategy, max_grad_norm=None), [{"micro_batch": 4}] * 2)
    seen["lora"] = _updates(Training(strategy, lora=True), [{"micro_batch": 2}] * 2)
    seen["shards"] = _shards(strategy)
    seen["resumed"] = _resume(strategy, folder)
    seen["diverged"] = _diverge(strategy)
    return seen


def _updates(training: Training, updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [training.update(**update) for update in updates]
    return {"losses": [loss for loss, _ in pairs], "norms": [norm for _, norm in pairs], "weights": training.weights()}


def _shards(strategy: Strategy) -> dict[str, Any]:
    training = Training(strategy)
    sizes: list[tuple[int, int]] = []
    names: list[str] = []
    only: list[str] = []
    for shard in strategy.state_dict_shards(training.trained.model, SHARD_BYTES):
        sizes.append((len(shard), sum(tensor.numel() * tensor.element_size() for tensor in shard.values())))
        names.extend(shard)
    for shard in strategy.state_dict_shards(training.trained.model, SHARD_BYTES, lambda name: "norm" in name):
        only.extend(shard)
    own = list(strategy.unwrap(training.trained.model).state_dict())
    return {"sizes": sizes, "names": names, "only": only, "state_dict": own, "weights": training.weights()}


def _resume(strategy: Strategy, folder: Path) -> dict[str, Any]:
    first = Training(strategy)
    first.update()
    first.update()
    first.save(folder)
    saved = first.weights()
    uninterrupted = _updates(first, [{}, {}])
    second = Training(strategy, seed=7)
    second.load(folder, done=2)
    loaded = second.weights()
    return {"saved": saved, "loaded": loaded, "uninterrupted": uninterrupted, "resumed": _updates(second, [{}, {}])}


def _diverge(strategy: Strategy) -> dict[str, Any]:
    import torch

    training = Training(strategy)
    training.update()
    before = training.weights()
    ids = torch.zeros(1, 3, dtype=torch.long, device=strategy.device)
    with strategy.accumulate(training.trained.model, is_last=True):
        loss = token_loss(training.trained.model(input_ids=ids).logits, ids)
        # Only rank 0's loss is broken; all must refuse the step.
        strategy.backward(loss * (float("nan") if strategy.is_main else 1.0), training.trained.optimizer)
    message = ""
    try:
        strategy.step(training.trained)
    except DivergenceError as error:
        message = str(error)
    after = training.weights()
    refused = strategy.all_gather_objects(bool(message))
    return {"refused": refused, "before": before, "after": after, "next_loss": training.update()[0]}


def run_strategies(
    cases: Sequence[StrategyCase], num_processes: int, folder: Path, *, load_chain: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Observe every case in `num_processes` processes that are started once. Case name -> what rank 0 saw.

    `load_chain` names cases, each of which then loads what the one before saved ("chain" in its result).
    """
    from torch.multiprocessing.spawn import start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (num_processes, port, list(cases), folder, list(load_chain))
    running = start_processes(_worker, arguments, nprocs=num_processes, join=False, start_method="spawn")
    try:
        while not running.join():
            pass
    finally:  # also where a test's limit of time cuts the wait
        for process in running.processes:
            process.kill()
    return {case.name: load_tree(folder / f"{case.name}.safetensors") for case in cases}


def _worker(
    rank: int, num_processes: int, port: int, cases: list[StrategyCase], folder: Path, load_chain: list[str]
) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    # One group for all cases: strategies use a group that exists. Their own joining is tested apart.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_START_SECONDS))
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        strategy = case.make()
        strategy.setup()
        results[case.name] = observe(strategy, folder / case.name)
        strategy.teardown()
    for source, name in itertools.pairwise(load_chain):
        results[name]["chain"] = _load_from(next(case for case in cases if case.name == name), source, folder)
    if rank == 0:
        for name, seen in results.items():
            save_tree(folder / f"{name}.safetensors", seen)
    dist.destroy_process_group()


def _load_from(case: StrategyCase, source: str, folder: Path) -> dict[str, Any]:
    strategy = case.make()
    strategy.setup()
    training = Training(strategy, seed=7)
    training.load(folder / source, done=2)
    loaded = training.weights()
    training.save(folder / case.name)
    seen = {"loaded": loaded, "next_losses": [training.update()[0] for _ in range(2)]}
    strategy.teardown()
    return seen


def train_alone(*, updates: int, lora: bool = False, max_grad_norm: float | None = MAX_GRAD_NORM) -> dict[str, Any]:
    """The same training written out with nothing but torch: what the strategies are compared with."""
    import torch

    model = tiny_model(lora=lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.1, foreach=False)
    losses, norms = [], []
    for done in range(updates):
        generator = torch.Generator().manual_seed(1000 + done)
        samples = torch.randint(0, VOCABULARY, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
        loss = token_loss(model(input_ids=samples).logits, samples)
        torch.autograd.backward(loss)
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, limit)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + done)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors of `one`, which must be in `other`."""
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def change_cosine(
    start: Mapping[str, torch.Tensor], one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> float:
    """Cosine between how `one` and how `other` moved from `start`, over all weights together."""
    import torch

    first = torch.cat([(one[name] - start[name]).flatten() for name in one])
    second = torch.cat([(other[name] - start[name]).flatten() for name in one])
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))
