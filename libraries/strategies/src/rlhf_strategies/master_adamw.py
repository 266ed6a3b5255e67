"""AdamW over float32 copies ("master weights", Micikevicius 2018, arXiv:1710.03740, section 3.1) of 16-bit parameters.

An AdamW step is about `lr` in size, and a bfloat16 weight w changes only if the step is at least half the distance to
the next representable value, up to |w| / 256. At lr 1e-6 weights above 5e-4 would never change. A copy with 24 bits of
precision does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

MASTER = "master"
"""Key of a parameter's master weights in the optimizer's state."""
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def is_16_bit(parameter: Tensor) -> bool:
    """Whether AdamW steps would be lost in the parameter's rounding."""
    return parameter.dtype in _SIXTEEN_BITS


class MasterAdamW(AdamW):
    """torch's fused AdamW with float32 moments and master weights for 16-bit parameters.

    `state[parameter]` holds `step`, `exp_avg`, `exp_avg_sq` and, for a 16-bit parameter, `master`: float32, with its
    shape, device and sharding. A step rounds it into the parameter. Other code that writes a parameter must also call
    `put_master`.
    """

    def master(self, parameter: Tensor) -> Tensor:
        """The float32 tensor that a step updates for the parameter: the parameter itself unless it has 16 bits."""
        if not is_16_bit(parameter):
            return parameter
        state = self.state[parameter]
        if MASTER not in state:
            state[MASTER] = parameter.detach().float()
        master: Tensor = state[MASTER]
        return master

    def put_master(self, parameter: Tensor, value: Tensor) -> None:
        """Store `value`, in the parameter's layout, unrounded. Does nothing unless the parameter has 16 bits."""
        if is_16_bit(parameter):
            self.state[parameter][MASTER] = value.detach().to(parameter.device, torch.float32, copy=True)

    def forget_moments(self) -> None:
        """Drop all state except the master weights."""
        for state in self.state.values():
            for key in [key for key in state if key != MASTER]:
                del state[key]

    def take_gradients(self) -> list[Tensor]:
        """The tensors that a step will change, each with a float32 `grad` to unscale and clip.

        16-bit gradients are freed once copied.
        """
        taken = []
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.master(parameter)
                if master is not parameter and parameter.grad is not None:
                    master.grad = parameter.grad.float()
                    parameter.grad = None
                if master.grad is not None:
                    taken.append(master)
        return taken

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # always called without a closure
        """Step the master weights (Loshchilov 2019) and round them into their parameters."""
        self.take_gradients()
        wide = {p: self.state[p].pop(MASTER) for group in self.param_groups for p in group["params"] if is_16_bit(p)}
        self._exchange(wide)
        try:
            super().step()
        finally:
            self._exchange({master: parameter for parameter, master in wide.items()})
            for parameter, master in wide.items():
                self.state[parameter][MASTER] = master
        for parameter, master in wide.items():
            if master.grad is not None:
                parameter.copy_(master)

    def _exchange(self, others: Mapping[Tensor, Tensor]) -> None:
        """Replace parameters in the groups and the state, so that torch steps the other tensors."""
        for group in self.param_groups:
            group["params"] = [others.get(each, each) for each in group["params"]]
        for each, other in others.items():
            self.state[other] = self.state.pop(each)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients. Those of the master weights are always set to None."""
        super().zero_grad(set_to_none)
        for state in self.state.values():
            if MASTER in state:
                state[MASTER].grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but without rounding state to the type of its parameter."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if is_16_bit(parameter) and key != "step":
                        self.state[parameter][key] = value.to(parameter.device, torch.float32, copy=True)
