"""Compare log-probs of engine `hf` with the trainer's, and of rows alone with rows together, for every causal LM.

Builds one tiny random model in fp32 for each architecture that this transformers supports at this size, each in a
separate process. Rows have different lengths. Those of `phi3-longrope` exceed the original length. Prints a Markdown
table, then the architectures that could not be built, with reasons.

    python benchmarks/architectures.py [KIND ...]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import queue
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

VOCABULARY = 50
PROMPT_TOKENS = (3, 9, 5, 14, 2, 9)
ANSWER_TOKENS = 12
"""Maximum answer length."""
BOUND = 1e-4
SECONDS = 90

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "is_decoder": True, "hidden_size": 32, "n_embd": 32, "d_model": 32, "embedding_size": 32, "lru_width": 32,
    "word_embed_proj_dim": 32, "attention_hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "num_layers": 4,
    "n_layer": 4, "n_layers": 4, "decoder_layers": 2, "encoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attention_head_dim": 8, "rotary_dim": 4, "n_positions": 128,
    "max_position_embeddings": 128, "context_length": 128, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "attention_window_size": 16, "sliding_window": 16, "window_size": 16,
    "block_size": 8, "state_size": 4, "time_step_rank": 4, "expand_ratio": 2, "chunk_size": 8, "n_groups": 1,
    "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "n_mamba_heads": 2, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "mamba_dt_rank": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
}  # fmt: skip
"""Config values to set if the config has the key."""
LATENT: dict[str, Any] = {"head_dim": 4, "qk_rope_head_dim": 4, "qk_head_dim": 12, "num_key_value_heads": 4}
ORIGINAL = 12
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 6.0, 9.0],
    "original_max_position_embeddings": ORIGINAL, "factor": 4.0,
}  # fmt: skip
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 30, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE}),
    "bamba": ("bamba", {"attn_layer_indices": [1]}),
    "falcon": ("falcon", {"head_dim": None}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 64}),
    "gpt_neo": ("gpt_neo", {"num_hidden_layers": None, "attention_types": [[["global", "local"], 2]]}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2}),
    "kimi_linear": ("kimi_linear", LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "prophetnet": ("prophetnet", {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2}),
    "xlnet": ("xlnet", {"max_position_embeddings": None, "d_head": None, "d_inner": 48}),
    "xlstm": ("xlstm", {"v_head_dim": None, "qk_head_dim": None}),
    "xmod": ("xmod", {"default_language": "en_XX"}),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 16, "expand": 2}),
    **{
        kind: (kind, LATENT)
        for kind in (
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
            "longcat_flash", "minicpm3", "youtu",
        )
    },
}  # fmt: skip
"""Model type and additional config values by name in the table."""
TOO_LARGE = frozenset({"git", "got_ocr2", "qwen3_5_moe"})
"""Architectures with an image model that these keys do not make small."""


def kinds() -> list[str]:
    """Every architecture that transformers lists as a causal LM, and two with length-dependent rotary embeddings."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN} - TOO_LARGE)


def build(name: str) -> Any:
    """Build a random model, with weights large enough that its distributions are far from uniform."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, own = OWN.get(name, (name, {}))
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    options = {key: value for key, value in SIZES.items() if hasattr(default, key)} | own
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{k: v for k, v in options.items() if v is not None}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.15)
    return model.float()


def measure(name: str) -> dict[str, Any]:
    """Measure in this process how rows share a pass, and the two gaps in nats."""
    import torch

    from rlhf_core.batching import collate
    from rlhf_core.components import EngineContext
    from rlhf_core.types import BufferItem, GenerationRequest, SamplingParams
    from rlhf_forward.forward import policy_forward
    from rlhf_hf.config import HfEngineConfig
    from rlhf_hf.engine import build as build_engine
    from rlhf_models import disable_dropout
    from rlhf_passes.fast_passes import fast_passes
    from rlhf_passes.packing import takes_packed_rows
    from rlhf_testing.models import tiny_tokenizer

    torch.set_num_threads(1)
    model = build(name)
    disable_dropout(model)
    model.eval()
    context = EngineContext(model=model, tokenizer=tiny_tokenizer("abc"), device=torch.device("cpu"), seed=3)
    engine = build_engine(HfEngineConfig(), context)
    draw = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, VOCABULARY, (p,), generator=draw).tolist()) for p in PROMPT_TOKENS]
    asked = [GenerationRequest(sample_id=i, prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    answers = {each.sample_id: each for each in engine.generate(asked, SamplingParams(max_new_tokens=ANSWER_TOKENS))}
    batch = collate(
        [
            BufferItem(
                sample_id=i,
                group_id=i,
                policy_version=0,
                prompt_ids=torch.tensor(prompt),
                response_ids=torch.tensor(answers[i].token_ids),
                action_mask=torch.ones(len(answers[i].token_ids), dtype=torch.bool),
                action_log_probs=torch.tensor(answers[i].logprobs),
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    with torch.no_grad():
        training = model.train()
        with fast_passes(training):
            packed = takes_packed_rows(training)
            together = policy_forward(training, batch, 1.0).log_probs
            found = {each.name: getattr(batch, each.name) for each in fields(batch)}
            tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
            rows = [
                replace(batch, **{name: each[i : i + 1] for name, each in tensors.items()}) for i in range(len(batch))
            ]
            alone = torch.cat([policy_forward(training, row, 1.0).log_probs for row in rows])
        model.eval()
        short, longer = (model(torch.tensor([prompts[3][:length]])).logits[0, :8] for length in (8, ORIGINAL))
    return {
        "trainer": "packed" if packed else "right-padded",
        "engine": engine.path.name,
        "engine_gap": float((together - batch.action_log_probs).abs().max()),
        "batch_gap": float((together - alone).abs().max()),
        "causal": bool((short - longer).abs().max() < 1e-2),
    }


def _in_child(name: str, results: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        results.put(measure(name))
    except Exception as error:  # any error of a config or model of this size is the result for this kind
        text = str(error).strip().splitlines()
        results.put({"error": f"{type(error).__name__}: {text[0][:90] if text else ''}"})


def measured(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results by name, each measured in a separate process."""
    import rlhf_hf.engine  # noqa: F401  # imported once here instead of in every child

    context = multiprocessing.get_context("fork")
    for name in names:
        results = context.Queue()
        child = context.Process(target=_in_child, args=(name, results))
        child.start()
        try:
            found = results.get(timeout=SECONDS)
        except queue.Empty:
            found = {"error": f"no answer within {SECONDS} s"}
        child.kill()
        child.join()
        yield name, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="names in the table, default: all")
    names = parser.parse_args().kinds or kinds()
    failed, above = [], []
    print("| architecture | rows in the trainer | engine `hf` | engine - trainer, nats | alone - together, nats |")
    print("|---|---|---|---|---|")
    for name, found in measured(names):
        if "error" in found:
            failed.append(f"{name} ({found['error']})")
            continue
        note = "" if found["causal"] else " (not causal)"
        gaps = found["engine_gap"], found["batch_gap"]
        print(f"| {name}{note} | {found['trainer']} | {found['engine']} | {gaps[0]:.1e} | {gaps[1]:.1e} |", flush=True)
        if not max(gaps) < BOUND:
            above.append(name)
    print(f"\nAbove {BOUND:.0e}: {', '.join(above) or 'none'}\nNot built: {'; '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
