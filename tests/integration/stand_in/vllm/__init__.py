"""The part of vLLM that the engine `vllm` uses, over transformers on a CPU: real weights, real answers, no speed.

With it every strategy, adapter and transport is tried with that engine where vLLM itself is not installed.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM


class SamplingParams(SimpleNamespace):
    """As they are given."""


class EngineArgs(SimpleNamespace):
    """As they are given."""


class Model:
    """A model that takes weights by name."""

    def __init__(self, model):
        self.model = model

    def named_parameters(self):
        return self.model.named_parameters()

    def load_weights(self, weights):
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
                loaded.add(name)
        return loaded


class LLMEngine:
    """Answers one request a step, each with noise of its own seed."""

    def __init__(self, args):
        config = AutoConfig.from_pretrained(args.model)
        self._model = Model(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval())
        self.model_config = SimpleNamespace(max_model_len=args.max_model_len or config.max_position_embeddings)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self._requests = {}

    @classmethod
    def from_engine_args(cls, args):
        return cls(args)

    def add_request(self, name, prompt, params):
        self._requests[name] = (prompt["prompt_token_ids"], params)

    def abort_request(self, names):
        for name in names:
            self._requests.pop(name, None)

    @torch.no_grad()
    def step(self):
        name = next(iter(self._requests))
        prompt, params = self._requests.pop(name)
        noise = torch.Generator().manual_seed(params.seed % 2**63) if params.temperature else None
        ids, tokens, logprobs, reason = list(prompt), [], [], "length"
        while len(tokens) < params.max_tokens:
            logits = self._model.model(torch.tensor([ids])).logits[0, -1].float()
            if noise is not None:
                assert params.top_p == 1 and not params.top_k, "the stand-in cuts nothing"
                logits = logits / params.temperature
            log_probs = logits.log_softmax(-1)
            token = int(log_probs.argmax() if noise is None else log_probs.exp().multinomial(1, generator=noise))
            ids.append(token)
            tokens.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(log_probs[token]))})
            if token in params.stop_token_ids:
                reason = "stop"
                break
        answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[answer], num_cached_tokens=0)]

    def collective_rpc(self, method, args):
        assert not self._requests
        method(self, *args)

    def get_model(self):
        return self._model

    def reload_weights(self, weights_iterator):
        self._model.load_weights(weights_iterator)

    def reset_prefix_cache(self):
        return True


def _module(name, **members):
    made = ModuleType(f"{__name__}.{name}")
    vars(made).update(members)
    sys.modules[made.__name__] = made
    return made


sampling_params = _module("sampling_params", RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
platforms = _module(
    "platforms",
    current_platform=SimpleNamespace(is_cpu=lambda: True, is_sleep_mode_available=lambda: False),
)
distributed = _module("distributed", __path__=[])
distributed.parallel_state = _module("distributed.parallel_state", cleanup_dist_env_and_memory=lambda: None)
