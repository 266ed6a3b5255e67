"""A tiny random model of each family of models that see, with a tokenizer and an image processor made in code."""

from functools import partial
from pathlib import Path
from random import Random

import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from rlhf_core.batching import collate
from rlhf_core.config.sections import ModelConfig
from rlhf_core.models.kinds import model_kind_for
from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import BufferItem, GenerationRequest
from rlhf_forward import policy_forward
from rlhf_images import ImageLimits, ImageReader, read_images

WIDTH = 32
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = (
    "<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<start_of_image>",
    "<end_of_image>",     "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<img>", "</img>", "<|vision_pad|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)),
)  # fmt: skip
ID = {token: place for place, token in enumerate(SPECIAL)}
NAMED = {
    "image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "video_token": "<|video_pad|>", "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": "<image>", "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
"""Attributes of the tokenizer that transformers' processors of the families read, as vLLM does at its start."""
PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)
FAMILIES = ("llava", "idefics3", "smolvlm", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")


def text_sizes(num_heads):
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
        "max_position_embeddings": 512,
        "vocab_size": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def tokenizer_of(image_text):
    characters = [chr(code) for code in (10, *range(32, 127))]
    lines = ("\n\n", "\n\n\n", "\n\n\n\n")  # tokens that no text gets, but vLLM looks up for Gemma 3
    vocabulary = {token: place for place, token in enumerate((*SPECIAL, *characters, *lines))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = Split(Regex(r"[\s\S]"), "isolated"), Fuse()
    # Here, since the option of transformers accepts either a list or names: others would become a token per character.
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=NAMED
    )
    tokenizer.chat_template = PARTS.replace("IMAGE", image_text)
    return tokenizer


def llava(text):
    vision = transformers.CLIPVisionConfig(**VISION, image_size=24, patch_size=8, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**text), image_token_index=ID["<image>"],
        vision_feature_layer=-2, image_seq_length=9,
    )  # fmt: skip
    size = {"height": 24, "width": 24}
    return config, transformers.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=size), "<image>"


def idefics3(text, config_class=transformers.Idefics3Config, processor_class=transformers.Idefics3ImageProcessorPil):
    vision = {**VISION, "image_size": 32, "patch_size": 8}
    config = config_class(
        vision_config=vision, text_config=transformers.LlamaConfig(**text), image_token_id=ID["<image>"],
        scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    edge = {"longest_edge": 32}
    return config, processor_class(size={"longest_edge": 64}, max_image_size=edge), "<image>"


def smolvlm(text):
    return idefics3(text, transformers.SmolVLMConfig, transformers.SmolVLMImageProcessorPil)


def gemma3(text):
    head = WIDTH // text["num_attention_heads"]
    text = transformers.Gemma3TextConfig(**text, head_dim=head, sliding_window=512, query_pre_attn_scalar=head)
    vision = transformers.SiglipVisionConfig(**VISION, image_size=32, patch_size=8, vision_use_head=False)
    config = transformers.Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=4, image_token_index=ID["<image>"],
        boi_token_index=ID["<start_of_image>"], eoi_token_index=ID["<end_of_image>"],
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    return config, transformers.Gemma3ImageProcessorPil(size=size), "<start_of_image>"


def qwen(name, text):
    tokens = {
        "image_token_id": ID["<image>"],
        "video_token_id": ID["<|video_pad|>"],
        "vision_start_token_id": ID["<|vision_start|>"],
        "vision_end_token_id": ID["<|vision_end|>"],
    }
    head = WIDTH // text["num_attention_heads"]
    sections = [head // 8, head // 8, head // 4]
    text = {**text, "rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 10_000.0}}
    common = {"num_heads": 4, "depth": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if name == "Qwen2VL":
        vision = {**common, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    elif name == "Qwen2_5_VL":
        vision = {
            **common, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
    else:
        vision = {
            **common, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }  # fmt: skip
        interleaved = {
            **text["rope_parameters"],
            "mrope_interleaved": True,
            "mrope_section": [head // 4, head // 8, head // 8],
        }
        text = {**text, "head_dim": head, "rope_parameters": interleaved}
    config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text, **tokens)
    processor = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=4, merge_size=2
    )
    return config, processor, "<|vision_start|><image><|vision_end|>"


def internvl(text):
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=transformers.Qwen2Config(**text), image_token_id=ID["<image>"],
        image_seq_length=4, downsample_ratio=0.5,
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    processor = transformers.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=2)
    return config, processor, "<image>"


MADE = {
    "llava": llava,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
    "qwen2_vl": partial(qwen, "Qwen2VL"),
    "qwen2_5_vl": partial(qwen, "Qwen2_5_VL"),
    "qwen3_vl": partial(qwen, "Qwen3VL"),
    "internvl": internvl,
}


def write_folder(family, folder, *, num_heads=4):
    config, processor, image_text = MADE[family](text_sizes(num_heads))
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # larger than at initialization, so that outputs depend on images
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    tokenizer_of(image_text).save_pretrained(folder)
    processor.save_pretrained(folder)


class Seeing:
    """A loaded model with its kind, tokenizer and prompts."""

    def __init__(self, path):
        self.path = str(path)
        self.kind = model_kind_for(ModelConfig(path=self.path))
        self.tokenizer = self.kind.load_tokenizer()
        self.model = self.kind.load_policy(dtype=torch.float32, seed=0, tokenizer=self.tokenizer).eval()
        self.encoder = PromptEncoder(self.tokenizer, kind=self.kind)

    def prompt(self, *content, position=0, seed=0):
        """`content`: texts and sizes (width, height) of images."""
        parts = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": picture(each, seed)}
            for each in content
        ]
        record = {"prompt": [{"role": "user", "content": parts}], "answer": "1"}
        return self.encoder.prompt(read_images(record, ImageReader(ImageLimits(), Path())), position, "record 1")


def picture(size, seed=0):
    return Image.frombytes("RGB", size, Random(f"{size}{seed}").randbytes(size[0] * size[1] * 3))


def requests_of(prompts, samples=2):
    """`samples` requests for each prompt."""
    return [
        GenerationRequest(
            sample_id=number * samples + k, prompt_ids=prompt.prompt_ids, inputs=prompt.columns.model_inputs
        )
        for number, prompt in enumerate(prompts)
        for k in range(samples)
    ]


def items_of(prompts, answers, samples=2):
    return [
        BufferItem(
            sample_id=answer.sample_id,
            group_id=answer.sample_id // samples,
            policy_version=0,
            prompt_ids=torch.tensor(prompts[answer.sample_id // samples].prompt_ids),
            response_ids=torch.tensor(answer.token_ids),
            action_mask=torch.ones(len(answer.token_ids), dtype=torch.bool),
            action_log_probs=torch.tensor(answer.logprobs),
            columns=prompts[answer.sample_id // samples].columns,
        )
        for answer in answers
    ]


def largest_gap(model, prompts, answers, samples=2):
    """The largest difference between the trainer's log-probs of answers and the engine's."""
    batch = collate(items_of(prompts, answers, samples))
    with torch.no_grad():
        output = policy_forward(model, batch, 1.0)
    return float((output.log_probs - batch.action_log_probs)[batch.action_mask].abs().max())
