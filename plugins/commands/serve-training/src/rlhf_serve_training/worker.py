"""One rank of the service: the base model, its adapters, and the work on them.

Every method of `Worker` is called on every rank with the same arguments, in the same order (see `ranks.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlhf_core.components import StrategyContext
from rlhf_core.errors import DivergenceError, UserInputError
from rlhf_core.models import model_kind_for
from rlhf_core.place import resolve_device
from rlhf_forward import PlacePasses, label_log_probs, token_logits
from rlhf_strategies import StrategyBase

from .adapters import Adapter, AdapterSpec, Slot
from .losses import Loss, inputs_of, loss_of
from .options import WHERE, WorkerOptions, model_config, plugin_of
from .owned_slot import OwnedSlot
from .sampling import Sampler, SampleWork
from .wire import Array, Row, Sampled

MAX_LOADED_SAMPLERS = 8
"""Maximum number of saved adapters that stay in memory for sampling."""


class Worker:
    """The base model with all adapters, on one rank."""

    def __init__(self, options: WorkerOptions) -> None:
        """Load the model and prepare it. Collective.

        Args:
            options: options of all ranks.
        """
        self.options = options
        selected, config = plugin_of("strategies", "strategy", options.strategy, options.strategy_options)
        context = StrategyContext(str(resolve_device(options.device)))
        self.strategy = cast(StrategyBase, selected.build(config, context))
        if self.strategy.precision == "fp16":
            raise UserInputError("fp16 is not supported by the service", where="--set strategy.precision")
        self.strategy.setup()
        kind = model_kind_for(model_config(options), "causal-lm")
        self.tokenizer = kind.load_tokenizer()
        self.dtype = self.strategy.parameter_dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        with self.strategy.model_init_context():
            model = kind.load_policy(dtype=self.dtype, seed=options.seed, tokenizer=self.tokenizer)
            kind.disable_noise(model, adapters=True)
        model.train()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = self.strategy.make_optimizer(trained, lr=1e-4)
        slot = OwnedSlot if options.is_owning else Slot
        self.slot = slot(self.strategy, self.strategy.prepare(model, optimizer), options.max_rank)
        self.adapters: dict[str, Adapter] = {}
        self._saved: OrderedDict[str, Adapter] = OrderedDict()
        self._sampler = Sampler(self.slot, options, self.tokenizer, self.dtype)

    @property
    def context_tokens(self) -> int | None:
        """Maximum number of tokens of a sequence. None if unlimited."""
        return self._sampler.context_tokens

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self._sampler.vocabulary_size

    def ping(self) -> None:
        """Do nothing: keeps idle ranks from timing out."""

    def create(self, name: str, spec: AdapterSpec) -> None:
        """Create an adapter.

        Args:
            name: id of the model.
            spec: choices of the client.
        """
        self.adapters[name] = self.slot.new(spec)

    def unload(self, name: str) -> None:
        """Drop an adapter, if it exists.

        Args:
            name: id of the model.
        """
        self.adapters.pop(name, None)

    def forward(
        self, name: str, rows: Sequence[Row], loss: str, config: Mapping[str, float | str], backward: bool
    ) -> tuple[list[dict[str, Array]], dict[str, float]]:
        """Compute a loss and, with `backward`, add its gradients to the adapter's. Collective.

        Returns:
            For each row `logprobs` and `elementwise_loss`, and the metrics.

        Raises:
            DivergenceError: the loss is not finite. No gradients are added.
        """
        adapter, strategy = self.adapters[name], self.strategy
        function = loss_of(loss, config, rows)
        self.slot.hold(adapter)
        mine = list(range(len(rows)))[strategy.rank :: strategy.world_size]
        passes = PlacePasses(strategy, self.slot.trained.model)
        plans = [[mine[i] for i in plan] for plan in self._plans(passes, [rows[i] for i in mine])]
        num_steps = int(strategy.all_reduce(torch.tensor([float(len(plans))]), "max").item())
        try:
            total, outputs = self._run(passes, rows, function, plans, num_steps, backward)
        except BaseException:
            self.slot.drop(adapter)
            raise
        totals = strategy.all_gather_objects((total, outputs))
        loss_sum = float(sum(each for each, _ in totals))
        if not np.isfinite(loss_sum):
            self.slot.drop(adapter)
            raise DivergenceError("the loss is not finite", where=WHERE, hint="lower the learning rate")
        if backward:
            self.slot.take_gradients(adapter)
        merged = {index: values for _, part in totals for index, values in part.items()}
        return [merged[index] for index in range(len(rows))], {"loss:sum": loss_sum}

    def _run(
        self,
        passes: PlacePasses,
        rows: Sequence[Row],
        function: Loss,
        plans: Sequence[Sequence[int]],
        num_steps: int,
        backward: bool,
    ) -> tuple[float, dict[int, dict[str, Array]]]:
        """Sum of this rank's losses, and the outputs of its rows by their indices."""
        model, strategy = self.slot.trained.model, self.strategy
        outputs: dict[int, dict[str, Array]] = {}
        total = 0.0
        model.train(backward)
        with torch.set_grad_enabled(backward):
            for step in range(num_steps):
                plan = plans[step] if step < len(plans) else []
                batch = [rows[i] for i in plan] or [rows[0]]
                with ExitStack() as stack:
                    stack.enter_context(passes.applied())
                    if backward:
                        stack.enter_context(strategy.accumulate(model, step == num_steps - 1))
                    with strategy.autocast():
                        log_probs, losses = self._losses(batch, function)
                    summed = losses.sum(dtype=torch.float64)
                    if backward:
                        scale = strategy.gradient_average_factor if plan else 0.0
                        strategy.backward(summed.to(losses.dtype) * scale, self.slot.optimizer)
                if plan:
                    total += float(summed.detach())
                    outputs |= _by_row(plan, batch, log_probs, losses)
        return total, outputs

    def _plans(self, passes: PlacePasses, rows: Sequence[Row]) -> list[list[int]]:
        """Micro-batches of rows with the same number of targets per position."""
        units: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            units.setdefault(row.num_targets, []).append(index)
        plans: list[list[int]] = []
        for _, of_kind in sorted(units.items()):
            found = passes.plan([[rows[i]] for i in of_kind], self.options.micro_batch_tokens)
            plans += [[of_kind[i] for i in plan] for plan in found]
        return plans

    def _losses(self, rows: Sequence[Row], loss: Loss) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and the loss of each position, [B, W] or [B, W, K]."""
        device, width = self.strategy.device, max(row.num_tokens for row in rows)
        lengths = torch.tensor([row.num_tokens for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).to(device)
        ids = _padded([row.token_ids for row in rows], width).to(device)
        targets = _padded([row.fields["target_tokens"] for row in rows], width).to(device)
        fields = {name: _padded([row.fields[name] for row in rows], width).to(device) for name in inputs_of(loss.name)}
        model = self.slot.trained.model
        if targets.ndim == 2:
            found = label_log_probs(model, ids, mask, mask, targets[mask])
        else:
            found = token_logits(model, ids, mask, mask).float().log_softmax(-1).gather(-1, targets[mask])
        zeros = torch.zeros(targets.shape, dtype=found.dtype, device=device)
        log_probs = zeros.index_put((mask,), found)
        return log_probs, loss(log_probs, fields, mask)

    def optim_step(self, name: str, options: Mapping[str, float]) -> tuple[float, int]:
        """Make one step of Adam with the gradients that an adapter has. Collective.

        Args:
            name: id of the model.
            options: options of the step (`Slot.step`).

        Returns:
            Norm of the gradients before clipping, and the number of steps since the adapter was created.

        Raises:
            UserInputError: there are no gradients.
            DivergenceError: the gradients are not finite.
        """
        adapter = self.adapters[name]
        if not adapter.has_gradients:
            raise UserInputError(
                "there are no gradients for a step", where="optim_step", hint="call forward_backward first"
            )
        return self.slot.step(adapter, options), adapter.steps

    def save(self, name: str, folder: str, with_optimizer: bool) -> None:
        """Write an adapter (`Slot.save`). Collective."""
        self.slot.save(self.adapters[name], Path(folder), with_optimizer=with_optimizer, base=self.options.base)

    def load(self, name: str, folder: str, with_optimizer: bool) -> None:
        """Replace or create an adapter with that of a folder (`Slot.load`). Gradients are dropped."""
        self.adapters[name] = self.slot.load(Path(folder), with_optimizer=with_optimizer)

    def save_state(self, name: str, folder: str) -> int:
        """Write all state of an adapter without gradients, and return its steps. Collective."""
        adapter = self.adapters[name]
        self.save(name, folder, True)
        return adapter.steps

    def sample(self, folder: str | None, works: Sequence[SampleWork]) -> list[Sampled]:
        """Sample with the adapter of a folder, or with the base model. Collective.

        Args:
            folder: a saved adapter, or None.
            works: the samples to make, in any order. Each pair of key and index occurs once.
        """
        return self._sampler.sample(self._loaded(folder), works)

    def score(
        self, folder: str | None, rows: Sequence[Sequence[int]], num_top: int
    ) -> list[tuple[list[float], list[dict[int, float]]]]:
        """Return log-probs of the tokens of rows after their first, and the most likely tokens at each. Collective."""
        return self._sampler.score(self._loaded(folder), rows, num_top)

    def _loaded(self, folder: str | None) -> Adapter | None:
        if folder is None:
            return None
        if folder not in self._saved:
            self._saved[folder] = self.slot.load(Path(folder), with_optimizer=False)
        self._saved.move_to_end(folder)
        while len(self._saved) > MAX_LOADED_SAMPLERS:
            self._saved.popitem(last=False)
        return self._saved[folder]

    def close(self) -> None:
        """Close the engine and leave the process group."""
        self._sampler.close()
        self.strategy.teardown()


def _padded(values: Sequence[Array], width: int) -> Tensor:
    """[B, width, ...], 0 on padding."""
    first = values[0]
    padded = np.zeros((len(values), width, *first.shape[1:]), dtype=first.dtype)
    for row, value in enumerate(values):
        padded[row, : len(value)] = value
    return torch.from_numpy(padded)


def _by_row(plan: Sequence[int], rows: Sequence[Row], log_probs: Tensor, losses: Tensor) -> dict[int, dict[str, Any]]:
    found, of_loss = log_probs.detach().float().cpu().numpy(), losses.detach().float().cpu().numpy()
    return {
        index: {"logprobs": found[i, : row.num_tokens].copy(), "elementwise_loss": of_loss[i, : row.num_tokens].copy()}
        for i, (index, row) in enumerate(zip(plan, rows, strict=True))
    }
