"""Chat templates modeled on known model families, each with a small byte-level tokenizer created in code.

For the conversations of tests they produce the same text as those families' templates, without dates and long default
texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("i", "n"), ("Ċ", "Ċ"), ("e", "r")]
"""Few merges, so that most texts have several tokenizations, of which `encode` returns one."""

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

_HERMES_TOOLS = """
    {{- '# Tools\n\nFunctions you may call:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nCall them as\n<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>' }}
"""

_TOOL_RESULTS = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
"""

_HERMES_CALLS = """
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
"""

QWEN2 = (
    """
{%- set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
    {{- '\n\n' }}
"""
    + _HERMES_TOOLS
    + """
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- '<|im_start|>assistant\n' + content }}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\n' }}"
    + _TOOL_RESULTS
    + """
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
)

QWEN3 = (
    """
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
    {%- if tools %}
"""
    + _HERMES_TOOLS
    + """
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.found = true %}
        {%- set ns.query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\n' }}"
    + _TOOL_RESULTS
    + """
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
)

QWEN3_NO_THINKING = "{%- set enable_thinking = false %}" + QWEN3

LLAMA3 = """
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nAnswer with JSON in the format {"name": function name, ' }}
    {{- '"parameters": dictionary of arguments}.\n\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\n\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""

NO_END = """
{%- for message in messages %}
    {{- '<|observation|>' if message.role == 'tool' else '<|' + message.role + '|>' }}
    {{- '\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""
"""A reply ends with the start of the next message, as in GLM-4."""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
_GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")

FAMILIES: dict[str, tuple[str, tuple[str, ...], str, str | None]] = {
    "chatml": (CHATML, _CHATML_TOKENS, "<|im_end|>", None),
    "qwen2": (QWEN2, _CHATML_TOKENS, "<|im_end|>", None),
    "qwen3": (QWEN3, _CHATML_TOKENS, "<|im_end|>", None),
    "qwen3-no-thinking": (QWEN3_NO_THINKING, _CHATML_TOKENS, "<|im_end|>", None),
    "llama3": (LLAMA3, _LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>"),
    "gemma": (GEMMA, _GEMMA_TOKENS, "<eos>", "<bos>"),
    "no-end": (
        NO_END,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "<|endoftext|>",
        None,
    ),
}
"""Template, special tokens, EOS and BOS by family."""


@lru_cache
def chat_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a family. As in the originals, encoding a separate text adds a BOS."""
    template, specials, eos, bos = FAMILIES[family]
    return byte_tokenizer(template, specials, eos=eos, bos=bos)


def byte_tokenizer(
    template: str | None, specials: Sequence[str] = ("<eos>",), *, eos: str = "<eos>", bos: str | None = None
) -> PreTrainedTokenizerBase:
    """Create a byte-level BPE tokenizer with few merges."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    if bos is not None:
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def byte_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Encode a text with one token per byte. Decoding and encoding it again usually gives other ids."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = byte_level.pre_tokenize_str(text)
    return tuple(tokenizer.convert_tokens_to_ids(char) for piece, _ in pieces for char in piece)
