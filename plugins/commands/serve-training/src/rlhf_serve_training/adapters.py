"""Adapters of all tenants in one slot: the trained adapter of a model that a strategy has prepared.

A strategy prepares a model once, so the server prepares one adapter of the largest rank that it offers, the slot. Each
adapter's weights, gradients and moments are held outside of it, and enter the slot for its turns. An adapter of a
smaller rank, or one that leaves out some layers, fills the rest with zeros. There A and B are both zero, so their
gradients are zero, and Adam leaves them at zero: the adapter computes and learns as it would with its own rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlhf_core.errors import CheckpointError
from rlhf_core.strategy import TrainedModel
from rlhf_core.util import write_tensors
from rlhf_strategies import StrategyBase, local_part, whole_tensor

ALPHA = 32.0
"""Scale of every adapter: its output is multiplied by ALPHA / rank. The default of `model.lora.alpha`."""
ADAPTER_FILE, ADAPTER_CONFIG, OPTIMIZER_FILE = "adapter_model.safetensors", "adapter_config.json", "adam.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Choices of the client that created an adapter."""

    rank: int
    seed: int = 0
    attention: bool = True
    """Whether attention layers have an adapter."""
    mlp: bool = True
    """Whether all other linear layers have one."""

    def covers(self, layer: str) -> bool:
        """Whether the layer with this name has an adapter."""
        is_attention = any("attn" in part or "attention" in part for part in layer.lower().split("."))
        return self.attention if is_attention else self.mlp


@dataclass(slots=True)
class Adapter:
    """State of an adapter on this rank: its part of each tensor, in the slot's shapes."""

    spec: AdapterSpec
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Sums of the gradients since the last step. Empty without any, or if the strategy keeps them."""
    has_gradients: bool = False
    """Whether there are gradients since the last step."""
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Adam's state by parameter. Empty before the first step."""
    steps: int = 0


class Slot:
    """The adapter of the prepared model, in which one adapter at a time computes.

    Example:
        slot.hold(adapter)
        for batch in micro_batches:
            strategy.backward(loss(trained.model, batch), slot.optimizer)
        slot.take_gradients(adapter)
        norm = slot.step(adapter, {"learning_rate": 1e-4, ...})
    """

    def __init__(self, strategy: StrategyBase, trained: TrainedModel, rank: int) -> None:
        """Create the slot of a prepared model, whose trained parameters are all those of an adapter.

        Args:
            strategy: the strategy that prepared the model.
            trained: the model.
            rank: rank of the model's adapter.
        """
        self.strategy = strategy
        self.trained = trained
        self.rank = rank
        model = strategy.unwrap(trained.model)
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._layers_of_adapter: list[Any] = [module for module in model.modules() if _is_layer(module)]
        self._held: Adapter | None = None
        self._scale = 0.0

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the slot's parameters."""
        return self.trained.optimizer

    def hold(self, adapter: Adapter | None) -> None:
        """Copy an adapter's weights into the slot. None disables the adapter by zeros: the base model.

        Args:
            adapter: the adapter. Does nothing if the slot holds it already.
        """
        if adapter is self._held and adapter is not None:
            return
        for module in self._sharded:  # a forward without a backward may leave gathered copies of the old weights
            module.reshard()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if adapter is None:
                    _own(parameter).zero_()
                else:
                    _own(parameter).copy_(adapter.weights[name])
        self._set_scale(1.0 if adapter is None else ALPHA / adapter.spec.rank)
        self._held = adapter

    def copy_to(self, adapter: Adapter | None, model: nn.Module) -> None:
        """Copy an adapter's full weights into another model with the same adapter layers. Collective.

        Args:
            adapter: the adapter, or None for zeros.
            model: a whole copy of the base model.
        """
        targets = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if adapter is None:
                    targets[name].zero_()
                else:
                    targets[name].copy_(whole_tensor(_like(parameter.detach(), adapter.weights[name])))
        for module in model.modules():
            if _is_layer(module):
                scaling: dict[str, float] = module.scaling  # type: ignore[assignment]
                scaling["default"] = 1.0 if adapter is None else ALPHA / adapter.spec.rank

    def take_gradients(self, adapter: Adapter) -> None:
        """Add the slot's gradients to those of an adapter, and clear them."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            gradient = _own(parameter.grad)
            if name in adapter.gradients:
                adapter.gradients[name] += gradient
            else:
                adapter.gradients[name] = gradient.clone()
        self.strategy.drop_gradients(self.trained)
        adapter.has_gradients = True

    def drop(self, adapter: Adapter) -> None:
        """Discard the gradients that the slot has after an error. Those of the adapter stay.

        Args:
            adapter: the adapter in the slot.
        """
        self.strategy.drop_gradients(self.trained)

    def step(self, adapter: Adapter, options: Mapping[str, float]) -> float:
        """Make one step of Adam with an adapter's gradients, and return their norm before clipping. Collective.

        Args:
            adapter: the adapter, with gradients.
            options: `learning_rate`, `beta1`, `beta2`, `eps`, `weight_decay` and `grad_clip_norm` (0 does not clip).

        Raises:
            DivergenceError: the norm is not finite. The gradients are dropped, and nothing else changes.
        """
        self.hold(adapter)
        self._set_options(options)
        with self._moments_of(adapter), torch.no_grad():
            for name, gradient in adapter.gradients.items():
                self.parameters[name].grad = _like(self.parameters[name], gradient)
            adapter.gradients, adapter.has_gradients = {}, False
            self._held = None  # until the step is complete
            norm = self.strategy.step(self.trained)
        self._held = adapter
        for name, parameter in self.parameters.items():
            adapter.weights[name].copy_(_own(parameter.detach()))
        adapter.steps += 1
        return norm

    def _set_options(self, options: Mapping[str, float]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = options["learning_rate"]
            group["betas"] = (options["beta1"], options["beta2"])
            group["eps"], group["weight_decay"] = options["eps"], options["weight_decay"]
        self.strategy.prepared_of(self.optimizer).max_grad_norm = options["grad_clip_norm"] or None

    @contextmanager
    def _moments_of(self, adapter: Adapter) -> Iterator[None]:
        """Context in which the optimizer has the adapter's moments, which are then stored with it again."""
        state = self.optimizer.state
        state.clear()
        for name, values in adapter.moments.items():
            state[self.parameters[name]] = values
        try:
            yield
        finally:
            stepped = {name: state[each] for name, each in self.parameters.items() if state.get(each)}
            adapter.moments = {name: dict(values) for name, values in stepped.items()}
            state.clear()

    def _set_scale(self, scale: float) -> None:
        if scale != self._scale:
            for each in self._layers_of_adapter:
                each.scaling["default"] = scale
            self._scale = scale

    def new(self, spec: AdapterSpec) -> Adapter:
        """Return a new adapter. It starts with the weights that `rlhf train` gives an adapter with this rank and seed.

        Args:
            spec: choices of the client.
        """
        full: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            for layer, (outputs, inputs) in self._layers().items():
                # The draws of PEFT for each layer: two linear layers, then A again.
                down, up = nn.Linear(inputs, spec.rank, bias=False), nn.Linear(spec.rank, outputs, bias=False)
                nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
                nn.init.zeros_(up.weight)
                is_covered = float(spec.covers(layer))
                full[layer + _DOWN] = down.weight.detach() * is_covered
                full[layer + _UP] = up.weight.detach()
        return Adapter(spec, self._own_parts(full))

    def _layers(self) -> dict[str, tuple[int, int]]:
        """Name of each adapted layer -> outputs and inputs, in the order in which PEFT creates their adapters."""
        names = [name.removesuffix(_DOWN) for name in self.parameters if name.endswith(_DOWN)]
        return {name: (self.parameters[name + _UP].shape[0], self.parameters[name + _DOWN].shape[1]) for name in names}

    def _own_parts(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of full tensors of an adapter's rank, padded to the slot's."""
        parts = {}
        for name, parameter in self.parameters.items():
            value = torch.zeros(parameter.shape, dtype=parameter.dtype)
            value[tuple(slice(size) for size in full[name].shape)] = full[name]
            parts[name] = _own(local_part(parameter.detach(), value)).clone()
        return parts

    def _full(self, parts: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Full tensors of an adapter's rank on the CPU, from the ranks' parts. Collective."""
        full = {}
        for name, part in parts.items():
            full[name] = cut(name, whole_tensor(_like(self.parameters[name], part)).detach().cpu(), rank)
        return full

    def _contents(self, adapter: Adapter, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full tensors of an adapter, and with `with_optimizer` its moments by key and name. Collective."""
        rank = adapter.spec.rank
        moments: dict[str, Tensor] = {}
        for key in MOMENTS if with_optimizer else ():
            parts = {name: _own(values[key]) for name, values in adapter.moments.items()}
            moments.update((f"{key}:{name}", value) for name, value in self._full(parts, rank).items())
        return self._full(adapter.weights, rank), moments

    def save(self, adapter: Adapter, folder: Path, *, with_optimizer: bool, base: str) -> None:
        """Write an adapter as a folder that PEFT can load, with the state of the optimizer. Collective.

        Args:
            adapter: the adapter.
            folder: a new folder, which rank 0 creates.
            with_optimizer: whether to write Adam's moments.
            base: name of the base model.
        """
        rank, (weights, moments) = adapter.spec.rank, self._contents(adapter, with_optimizer)
        layers = sorted({name.removesuffix(_DOWN).rpartition(".")[2] for name in weights if name.endswith(_DOWN)})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": layers,
        }

        def write() -> None:
            folder.mkdir(parents=True)
            named = {name.replace(".default.weight", ".weight"): value for name, value in weights.items()}
            metadata = {"spec": json.dumps(asdict(adapter.spec)), "steps": str(adapter.steps)}
            write_tensors(folder / ADAPTER_FILE, named, metadata)
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
            if with_optimizer:
                write_tensors(folder / OPTIMIZER_FILE, moments)

        self.strategy.run_on_main(write)

    def load(self, folder: Path, *, with_optimizer: bool) -> Adapter:
        """Return the adapter of a folder that `save` wrote. Collective: rank 0 reads it for all ranks.

        Args:
            folder: the folder, on rank 0's machine.
            with_optimizer: whether to read Adam's moments.

        Raises:
            CheckpointError: the folder is not a checkpoint of this base model, or its rank is above the slot's.
        """
        spec, steps, named, stored = self._read_on_main(folder, with_optimizer)
        full = {name.replace(".weight", ".default.weight"): value for name, value in named.items()}
        self._check(full, spec.rank, folder)
        adapter = Adapter(spec, self._own_parts(full))
        if not with_optimizer:
            return adapter
        for key in MOMENTS:
            of_key = {name.partition(":")[2]: value for name, value in stored.items() if name.startswith(f"{key}:")}
            if of_key:
                for name, part in self._own_parts(of_key).items():
                    adapter.moments.setdefault(name, {})[key] = _like(self.parameters[name], part)
        for name, values in adapter.moments.items():
            values["step"] = torch.tensor(float(steps), device=self.parameters[name].device)
        adapter.steps = steps
        return adapter

    def _read_on_main(
        self, folder: Path, with_optimizer: bool
    ) -> tuple[AdapterSpec, int, dict[str, Tensor], dict[str, Tensor]]:
        """Contents of a folder on every rank: spec, steps, weights and moments."""
        found: list[Any] = []

        def read() -> None:
            spec, steps = read_spec(folder)
            if spec.rank > self.rank:
                raise CheckpointError(f"its rank {spec.rank} is above the limit {self.rank}", where=str(folder))
            moments = _read(folder / OPTIMIZER_FILE) if with_optimizer else {}
            found.extend((spec, steps, _read(folder / ADAPTER_FILE), moments))

        self.strategy.run_on_main(read)
        spec, steps, weights, moments = self.strategy.broadcast_object(found)
        return spec, steps, weights, moments

    def _check(self, full: Mapping[str, Tensor], rank: int, folder: Path) -> None:
        for name, parameter in self.parameters.items():
            shape = (rank, parameter.shape[1]) if name.endswith(_DOWN) else (parameter.shape[0], rank)
            if name not in full or tuple(full[name].shape) != shape:
                raise CheckpointError(f"it is an adapter of another base model ({name} differs)", where=str(folder))


def cut(name: str, value: Tensor, rank: int) -> Tensor:
    """Return the part of a parameter of the slot that an adapter of this rank uses."""
    return value[:rank] if name.endswith(_DOWN) else value[:, :rank]


def read_spec(folder: Path) -> tuple[AdapterSpec, int]:
    """Return the choices of the client that created a saved adapter, and its steps. Raises `CheckpointError`."""
    try:
        with safe_open(str(folder / ADAPTER_FILE), framework="pt") as opened:
            metadata = opened.metadata()
            return AdapterSpec(**json.loads(metadata["spec"])), int(metadata["steps"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"it cannot be read: {error}", where=str(folder)) from error


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"it cannot be read: {error}", where=str(path)) from error


def _is_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "scaling", None), dict) and hasattr(module, "lora_A")


def _own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part as a tensor in the layout of a parameter."""
    if not isinstance(parameter, DTensor):
        return part
    whole: DTensor = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return whole
