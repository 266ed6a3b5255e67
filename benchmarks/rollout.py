"""Rollout tokens/s of the engine `hf` against transformers `generate`, interleaved in one run.

Fixed: every answer has the same number of tokens. Varied: answers end at one of several EOS tokens, so that lengths
are about geometric, with a queue of 4x the batch; `generate` takes the queue batch by batch. Both sample from the
same model and prompts at temperature 1; tokens after an answer's end are not counted for either.

    python benchmarks/rollout.py --models S M --repeats 5 --threads 2
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.builtin_models import build_character_tokenizer
from rlhf_core.components import EngineContext
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine, build

SIZES: dict[str, dict[str, int]] = {
    "S": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 352},
    "M": {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8192, "intermediate_size": 1408},
}
HEADS = {"S": 4, "M": 8}
BATCH, NEW_TOKENS, QUEUE = 32, 64, 4
MEAN_VARIED_TOKENS = 26
"""Mean of the geometric lengths before the cut at NEW_TOKENS."""


def build_model(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A random Llama; its distributions are nearly uniform, so the number of EOS ids sets the lengths."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], num_attention_heads=HEADS[size], bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).to(dtype).eval()


def build_requests(count: int) -> list[GenerationRequest]:
    """Different prompts of 16 to 64 tokens, in no order of length."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for index in range(count):
        length = 16 + 48 * (index * 13 % BATCH) // (BATCH - 1)
        ids = torch.randint(300, 500, (length,), generator=generator).tolist()
        requests.append(GenerationRequest(sample_id=index, prompt_ids=tuple(ids)))
    return requests


def run_engine(engine: HfEngine, requests: Sequence[GenerationRequest]) -> float:
    """Tokens a second of one pass."""
    start = time.perf_counter()
    tokens = sum(
        len(answer.token_ids) for answer in engine.generate(requests, SamplingParams(max_new_tokens=NEW_TOKENS))
    )
    return tokens / (time.perf_counter() - start)


def run_generate(model: LlamaForCausalLM, requests: Sequence[GenerationRequest], eos_ids: list[int]) -> float:
    """Tokens a second of transformers `generate`, left-padded batch after batch."""
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(requests), BATCH):
        prompts = [request.prompt_ids for request in requests[first : first + BATCH]]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        answers = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0,
            eos_token_id=eos_ids or None,
        )[:, longest:]  # fmt: skip
        ends = torch.isin(answers, torch.tensor(eos_ids)) if eos_ids else torch.zeros_like(answers, dtype=torch.bool)
        # Before and at the first end: those were wanted.
        tokens += int((ends.cumsum(dim=1) - ends.long() == 0).sum())
    return tokens / (time.perf_counter() - start)


def interleave(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure the sides in turn, after one warm-up each."""
    for side in sides.values():
        side()
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            measured[name].append(side())
    return measured


def compare(size: str, case: str, dtype: torch.dtype, repeats: int) -> None:
    """Print one line: medians of both sides and of the ratios of neighbours in time."""
    model = build_model(size, dtype)
    vocabulary = SIZES[size]["vocab_size"]
    eos_ids = list(range(4, 4 + round(vocabulary / MEAN_VARIED_TOKENS))) if case == "varied" else []
    model.generation_config.eos_token_id = eos_ids or None
    tokenizer = build_character_tokenizer("abc")
    tokenizer.eos_token = None
    requests = build_requests(BATCH * QUEUE if case == "varied" else BATCH)
    context = EngineContext(model=model, tokenizer=tokenizer, device=torch.device("cpu"), seed=0)
    engine = build(HfEngineConfig(max_batch_size=BATCH), context)
    measured = interleave(
        {"hf": lambda: run_engine(engine, requests), "generate": lambda: run_generate(model, requests, eos_ids)},
        repeats,
    )
    ratio = statistics.median(a / b for a, b in zip(measured["hf"], measured["generate"], strict=True))
    hf, peer = (statistics.median(measured[name]) for name in ("hf", "generate"))
    print(
        f"{size}  {case:7} {str(dtype)[6:]:9} hf {hf:8,.0f}  generate {peer:8,.0f} tokens/s  ratio {ratio:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--cases", nargs="+", choices=["fixed", "varied"], default=["fixed", "varied"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {options.threads} threads; {BATCH} rows, {NEW_TOKENS} new tokens at most"
    )
    for size in options.models:
        for case in options.cases:
            compare(size, case, getattr(torch, options.dtype), options.repeats)


if __name__ == "__main__":
    main()
