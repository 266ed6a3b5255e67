"""A tiny random model of each family, with a tokenizer and an image processor made in code, as a folder."""

from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from rlhf_core.config.sections import ModelConfig
from rlhf_core.models.kinds import model_kind_for
from rlhf_core.prompts import PromptEncoder
from rlhf_images import ImageLimits, ImageReader, read_images

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = (
    "<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<start_of_image>",
    "<end_of_image>",     "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<img>", "</img>", "<|vision_pad|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)),
)  # fmt: skip
ID = {token: place for place, token in enumerate(SPECIAL)}
PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)
FAMILIES = ("llava", "idefics3", "smolvlm", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")


def tokenizer_of(image_text):
    characters = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {token: place for place, token in enumerate((*SPECIAL, *characters))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = Split(Regex(r"[\s\S]"), "isolated"), Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]),
    )  # fmt: skip
    tokenizer.chat_template = PARTS.replace("IMAGE", image_text)
    return tokenizer


def llava():
    vision = transformers.CLIPVisionConfig(**VISION, image_size=24, patch_size=8, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=ID["<image>"],
        vision_feature_layer=-2, image_seq_length=9,
    )  # fmt: skip
    size = {"height": 24, "width": 24}
    return config, transformers.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=size), "<image>"


def idefics3(config_class=transformers.Idefics3Config, processor_class=transformers.Idefics3ImageProcessorPil):
    vision = {**VISION, "image_size": 32, "patch_size": 8}
    config = config_class(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=ID["<image>"],
        scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    edge = {"longest_edge": 32}
    return config, processor_class(size={"longest_edge": 64}, max_image_size=edge), "<image>"


def smolvlm():
    return idefics3(transformers.SmolVLMConfig, transformers.SmolVLMImageProcessorPil)


def gemma3():
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=512, query_pre_attn_scalar=8)
    vision = transformers.SiglipVisionConfig(**VISION, image_size=32, patch_size=8, vision_use_head=False)
    config = transformers.Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=4, image_token_index=ID["<image>"],
        boi_token_index=ID["<start_of_image>"], eoi_token_index=ID["<end_of_image>"],
    )  # fmt: skip
    size = {"height": 32, "width": 32}
    return config, transformers.Gemma3ImageProcessorPil(size=size), "<start_of_image>"


def qwen(name):
    tokens = {
        "image_token_id": ID["<image>"],
        "video_token_id": ID["<|video_pad|>"],
        "vision_start_token_id": ID["<|vision_start|>"],
        "vision_end_token_id": ID["<|vision_end|>"],
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    text = {**TEXT, "rope_parameters": rope}
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
        text = {**text, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text, **tokens)
    processor = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=4, merge_size=2
    )
    return config, processor, "<|vision_start|><image><|vision_end|>"


def internvl():
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=transformers.Qwen2Config(**TEXT), image_token_id=ID["<image>"],
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
    "qwen2_vl": lambda: qwen("Qwen2VL"),
    "qwen2_5_vl": lambda: qwen("Qwen2_5_VL"),
    "qwen3_vl": lambda: qwen("Qwen3VL"),
    "internvl": internvl,
}


def write_folder(family, folder):
    config, processor, image_text = MADE[family]()
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


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("model") / family
            write_folder(family, made[family])
        return made[family]

    return folder


@pytest.fixture
def open_model(folders):
    return lambda family: Seeing(folders(family))


@pytest.fixture(params=FAMILIES)
def seeing(request, open_model):
    return open_model(request.param)
