"""The part of vLLM that the engine uses, without a model: it counts, so that a test can see what reached it.

Answers are `prompt[0] + version, …` until the token limit, where the version is the sum of the weights that were
loaded. `FAKE_VLLM` in the environment says how it misbehaves.
"""

import json
import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

from safetensors.torch import load_file

from . import inputs, lora, multimodal, platforms, sampling_params
from .sampling_params import RequestOutputKind

if os.environ.get("FAKE_VLLM") == "old":
    del inputs.mm_input
if os.environ.get("FAKE_VLLM") == "broken":
    raise RuntimeError("operator torchvision::nms does not exist\nand more")


class SamplingParams(SimpleNamespace):
    pass


class EngineArgs(SimpleNamespace):
    pass


class Model:
    """Its only weight is the sum of those it is given."""

    def named_parameters(self):
        yield "total", None
        if os.environ.get("FAKE_VLLM") == "lacking":
            yield "lm_head.bias", None

    def load_weights(self, weights):
        self.total = round(sum(float(tensor.sum()) for _, tensor in weights))
        return {"total"}


class LLMEngine:
    def __init__(self, args):
        self.args = args
        self.model_config = SimpleNamespace(max_model_len=args.max_model_len or 64)
        self.requests = {}
        self.flying = {}
        self.model = Model()
        self.version = None
        self.asleep = set()

    @classmethod
    def from_engine_args(cls, args):
        if os.environ.get("FAKE_VLLM") == "unfit":
            raise ValueError("Unsupported CPU attention configuration: head_dim=16")
        if hasattr(args, "limit_mm_per_prompt"):
            assert list(Path(args.model).glob("*processor_config.json")), "vLLM loads the processor of images"
        return cls(args)

    def add_lora(self, request):
        """Its version is the sum of the adapter's factors, rounded, read from a folder as by vLLM."""
        assert self.args.enable_lora and self.args.load_format == "safetensors" and "weights" not in self.asleep
        assert request.lora_int_id == 1 and request.load_inplace
        folder = Path(request.lora_path)
        assert json.loads((folder / "adapter_config.json").read_text())["r"] <= self.args.max_lora_rank
        tensors = load_file(folder / "adapter_model.safetensors")
        self.version = round(sum(float(tensor.sum()) for tensor in tensors.values()))
        return os.environ.get("FAKE_VLLM") != "torn"

    def add_request(self, name, prompt, params, lora_request=None):
        assert (lora_request is not None) == getattr(self.args, "enable_lora", False)
        assert self.version is not None and not self.asleep, (self.version, self.asleep)
        if params.output_kind == RequestOutputKind.DELTA:
            self.flying[name] = [{**prompt, "prompt_token_ids": self.counted(prompt)}, params, 0]
            return
        self.requests[name] = (self.counted(prompt), params)

    def counted(self, prompt):
        """The prompt's ids. With images, the first one is larger by the number of images and of their pixels' rows."""
        if prompt.get("type") != "multimodal":
            return prompt["prompt_token_ids"]
        assert self.args.mm_processor_cache_gb == 0
        ids, items, places = (
            prompt["prompt_token_ids"],
            prompt["mm_kwargs"]["image"],
            prompt["mm_placeholders"]["image"],
        )
        assert all(each.endswith("-" + prompt["cache_salt"]) for each in prompt["mm_hashes"]["image"])
        spans = [ids[place.offset : place.offset + place.length] for place in places]
        assert len(spans) == len(items) and all(len(set(span)) == 1 for span in spans)
        assert ids.count(spans[0][0]) == sum(map(len, spans)), "every image token belongs to an image"
        return [ids[0] + len(items) + sum(len(each["pixel_values"]) for each in items), *ids[1:]]

    def step(self):
        if os.environ.get("FAKE_VLLM") == "hang":
            time.sleep(3600)
        if os.environ.get("FAKE_VLLM") == "die":
            os.kill(os.getpid(), 9)
        if os.environ.get("FAKE_VLLM") == "fail":
            raise RuntimeError("kernel failed")
        if self.flying:
            return self.fly()
        name = next(iter(self.requests))
        prompt, params = self.requests.pop(name)
        tokens = [prompt[0] + self.version] * params.max_tokens
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
        answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length")
        return [SimpleNamespace(request_id=name, finished=True, outputs=[answer], num_cached_tokens=None)]

    def abort_request(self, names):
        for name in names:
            self.requests.pop(name, None)
            self.flying.pop(name, None)

    def fly(self):
        """One token of each answer, which also tells the salt of its cached prefix, times a hundred."""
        outputs = []
        for name, growing in list(self.flying.items()):
            prompt, params, count = growing
            growing[2] += 1
            token = prompt["prompt_token_ids"][0] + self.version + 100 * int(prompt["cache_salt"])
            is_last = count + 1 == params.max_tokens
            if is_last:
                del self.flying[name]
            logprobs = [{token: SimpleNamespace(logprob=-0.5)}]
            output = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason="length" if is_last else None)
            outputs.append(SimpleNamespace(request_id=name, finished=is_last, outputs=[output], num_cached_tokens=0))
        return outputs

    def collective_rpc(self, method, args):
        """One worker is an object here; of several each is a process, which gets copies of the arguments."""
        assert not self.requests and "weights" not in self.asleep
        workers = self.args.tensor_parallel_size
        assert self.args.distributed_executor_backend == ("uni" if workers == 1 else "mp")
        for _ in range(workers):
            method(self, *(args if workers == 1 else pickle.loads(pickle.dumps(args))))

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        if os.environ.get("FAKE_VLLM") == "torn":
            raise RuntimeError("out of memory")
        self.model.load_weights(weights_iterator)
        self.version = self.model.total

    def reset_prefix_cache(self):
        return True

    def sleep(self, level):
        assert level == 1 and not self.requests and not self.asleep
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags):
        assert tags and self.asleep >= set(tags)
        self.asleep -= set(tags)


__all__ = ["EngineArgs", "LLMEngine", "SamplingParams", "inputs", "lora", "multimodal", "platforms", "sampling_params"]
