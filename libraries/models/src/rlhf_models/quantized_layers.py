"""The layers of `quantize`. They are subclasses of those of bitsandbytes, for which PEFT has adapters."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn

_library: Any = bitsandbytes


def _in_autocast(inputs: Tensor) -> Tensor:
    """The inputs in the type of autocast, as for a plain linear layer, whose weight is cast to it, too."""
    kind = inputs.device.type
    return inputs.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else inputs


class Nf4Linear(Linear4bit):
    """Linear layer with 4-bit NF4 weights in blocks of 64, whose scales have 8 bits. Inputs [..., columns]."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Nf4Linear:
        """Return the quantized layer of a linear layer on the CPU."""
        is_biased = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, is_biased, quant_type="nf4", device="meta")
        weight: Any = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
        layer.weight = weight.to(linear.weight.device)
        layer.bias = linear.bias
        layer.support_avx512bf16_for_cpu = False  # never repack the weights for evaluation
        return layer

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [rows, columns]."""
        weight: Any = self.weight
        return dequantize_4bit(weight.data, weight.quant_state).to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = _in_autocast(inputs)
        if inputs.device.type == "cpu":
            return _product(self, inputs)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        weight: Any = self.weight
        output: Tensor = _library.matmul_4bit(inputs, weight, quant_state=weight.quant_state, bias=bias)
        return output


class Int8Linear(Linear8bitLt):
    """Linear layer with 8-bit weights and one float32 scale per row. Inputs [..., columns] are not rounded."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Return the quantized layer of a linear layer on the CPU."""
        is_biased = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, is_biased, has_fp16_weights=False, device="meta")
        weight: Any = Int8Params(linear.weight.data, has_fp16_weights=False, requires_grad=False)
        layer.weight = weight.to(linear.weight.device)
        layer.bias = linear.bias
        layer.init_8bit_state()  # type: ignore[no-untyped-call]
        return layer

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        state: Any = self.state
        state.CB, state.SCB = self.weight.data, state.SCB.to(self.weight.device)
        return self

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [rows, columns]."""
        state: Any = self.state
        return _scaled(self.weight.data, state.SCB, dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return _product(self, _in_autocast(inputs))


def _scaled(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int8 `codes` [rows, columns] times their scales [rows] / 127."""
    return (codes.float() * (scales / 127.0)[:, None]).to(dtype)


def _product(layer: Nf4Linear | Int8Linear, inputs: Tensor) -> Tensor:
    product: Any = _Product
    output: Tensor = product.apply(inputs, layer)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """Product with a dequantized weight, which is dequantized again for the gradient instead of being kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Nf4Linear | Int8Linear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.dequantized(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None
