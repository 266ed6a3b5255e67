"""`rlhf export --gguf`: transformers reads the file back with the same logits, and everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import start
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from rlhf_cli.main import run
from rlhf_export.gguf_tokenizer import pre_tokenizer_name
from rlhf_testing.models import builtin_model

gguf = pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.usefixtures("no_plots"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:gguf"),
]
TEXT = "We sorted 31524 numbers, didn't we?\n\n  Yes: it's 12345 — naïve, but right.\n"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def byte_level(pattern: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few merges and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|pad|>"])
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return fast


def model_folder(folder: Path, kind: str, *, tied: bool = False) -> tuple[Any, PreTrainedTokenizerFast]:
    """A small model with random weights. Its embeddings have more rows than the tokenizer has tokens."""
    torch.manual_seed(0)
    options = {**SIZES, "vocab_size": 320, "tie_word_embeddings": tied}
    if kind == "llama":
        rope = {"rope_type": "default", "rope_theta": 5e4}
        model: Any = LlamaForCausalLM(LlamaConfig(**options, rope_parameters=rope))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**options))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**options, head_dim=128))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases start at 0, and norms at 1
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    tokenizer = byte_level({"llama": LLAMA3, "qwen2": QWEN, "qwen3": QWEN}[kind])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def read_back(file: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def difference(model: Any, other: Any, ids: list[int]) -> float:
    with torch.no_grad():
        return float((model(torch.tensor([ids])).logits - other(torch.tensor([ids])).logits).abs().max())


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)])
def test_transformers_reads_the_same_model(tmp_path: Path, kind: str, tied: bool) -> None:
    model, tokenizer = model_folder(tmp_path / "model", kind, tied=tied)
    file = tmp_path / "model.gguf"
    assert run(["export", str(tmp_path / "model"), "--gguf", str(file)]) == 0
    found, found_tokenizer = read_back(file)
    ids = tokenizer.encode(TEXT)
    assert found_tokenizer.encode(TEXT) == ids and len(ids) > 20
    assert found_tokenizer.decode(ids) == TEXT
    assert found.config.tie_word_embeddings == tied and found.config.vocab_size == 320
    assert difference(model, found, ids) < 1e-5
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["model.gguf"]


@pytest.mark.parametrize(("dtype", "bound", "name"), [("float16", 2e-2, "F16"), ("bfloat16", 1e-1, "BF16")])
def test_matrices_are_stored_in_sixteen_bits(tmp_path: Path, dtype: str, bound: float, name: str) -> None:
    model, tokenizer = model_folder(tmp_path / "model", "llama")
    file = tmp_path / "model.gguf"
    assert run(["export", str(tmp_path / "model"), "--gguf", str(file), "--dtype", dtype]) == 0
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(file).tensors}
    assert types["blk.0.attn_q.weight"] == name and types["output_norm.weight"] == "F32"
    assert 0 < difference(model, read_back(file)[0], tokenizer.encode(TEXT)) < bound


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def test_the_file_describes_the_tokenizer(tmp_path: Path) -> None:
    _, tokenizer = model_folder(tmp_path / "model", "qwen2")
    assert run(["export", str(tmp_path / "model"), "--gguf", str(tmp_path / "q.gguf")]) == 0
    found = fields(tmp_path / "q.gguf")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert tokens[tokenizer.eos_token_id] == "<|end|>" and kinds[tokenizer.eos_token_id] == gguf.TokenType.CONTROL
    assert tokens[-1] == "[PAD319]" and kinds[-1] == gguf.TokenType.UNUSED and len(tokens) == 320
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert found["tokenizer.ggml.add_bos_token"] is False and found["qwen2.attention.head_count_kv"] == 2


@pytest.mark.slow
def test_a_lora_run_of_the_built_in_model_is_merged(tmp_path: Path) -> None:
    changes = {"model": {"lora": {"r": 2}}, "train": {"episodes": 1, "prompts_per_episode": 4}}
    start({**changes, "optimizer": {"lr": 1e-2}, "checkpoint": {"every_episodes": 1}}, tmp_path / "run")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    for source in (tmp_path / "run", checkpoint):
        file = tmp_path / f"{source.name}.gguf"
        assert run(["export", str(source), "--gguf", str(file)]) == 0
        found, found_tokenizer = read_back(file)
        ids = tokenizer.encode("31524>")
        assert found_tokenizer.encode("31524>") == ids
        assert difference(trained, found, ids) < 1e-5


def test_rotary_factors_are_those_of_transformers(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "llama")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    scaled = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 320}, rope_parameters=rope))
    scaled.save_pretrained(tmp_path / "model")
    assert run(["export", str(tmp_path / "model"), "--gguf", str(tmp_path / "m.gguf")]) == 0
    (factors,) = (each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors if each.name == "rope_freqs.weight")
    default = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(default / torch.tensor(factors.data), scaled.model.rotary_emb.inv_freq)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(["export", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def change(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def test_what_llama_cpp_lacks_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    model_folder(tmp_path / "model", "qwen2")
    change(tmp_path / "model", use_sliding_window=True)
    assert "its config has use_sliding_window" in refusal(capsys, tmp_path / "model", "--gguf", file)
    change(tmp_path / "model", use_sliding_window=False, rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert "its config has rope_type: linear" in refusal(capsys, tmp_path / "model", "--gguf", file)
    change(tmp_path / "model", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    err = refusal(capsys, tmp_path / "model", "--gguf", file)
    assert "GPT2LMHeadModel is not supported" in err and "convert_hf_to_gguf.py" in err
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


def test_an_existing_file_and_a_large_weight_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = model_folder(tmp_path / "model", "llama")
    (tmp_path / "old.gguf").write_text("keep")
    assert "already exists" in refusal(capsys, tmp_path / "model", "--gguf", tmp_path / "old.gguf")
    assert "does not exist" in refusal(capsys, tmp_path / "model", "--gguf", tmp_path / "none" / "m.gguf")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", "--gguf", tmp_path / "m.gguf", "--dtype", "float16")
    assert "output.weight does not fit into float16" in refusal(capsys, *arguments)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "old.gguf"]


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert "pip install 'rlhf-export[gguf]'" in refusal(capsys, tmp_path, "--gguf", tmp_path / "m.gguf")


def spec(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(byte_level(None).backend_tokenizer.to_str())
    return made | changes


def test_pre_tokenizers_have_the_names_of_llama_cpp() -> None:
    for pattern, name in ((None, "gpt-2"), (QWEN, "qwen2"), (LLAMA3, "llama-bpe")):
        assert pre_tokenizer_name(json.loads(byte_level(pattern).backend_tokenizer.to_str())) == name
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]
    assert pre_tokenizer_name(spec(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})) == "smollm"
    _, tiny = builtin_model("builtin:tiny-digits", 0)
    assert pre_tokenizer_name(json.loads(tiny.backend_tokenizer.to_str())) == "gpt-2"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer Lowercase"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "only byte-level BPE is supported"),
        ({"pre_tokenizer": None}, "only byte-level BPE is supported"),
        ({"model": {"type": "Unigram", "vocab": {}}}, "and it is Unigram"),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "x"}},
                        {"type": "ByteLevel", "use_regex": False},
                    ],
                }
            },
            "its pre-tokenizer (Split, ByteLevel) is none of",
        ),
        (
            {
                "model": {"type": "WordLevel", "vocab": {"é": 0}},
                "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"},
            },
            "'é' is not a visible ASCII character",
        ),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], problem: str) -> None:
    from rlhf_core.errors import UserInputError

    with pytest.raises(UserInputError) as refused:
        pre_tokenizer_name(spec(**changes))
    assert problem in str(refused.value)
