"""Chat templates modeled on families with their own format of replies, shortened as in chat_templates.py."""

from __future__ import annotations

from functools import lru_cache

from chat_templates import byte_tokenizer
from transformers import PreTrainedTokenizerBase

_IM = ("<|im_start|>", "<|im_end|>")


def _chatml(calls: str) -> str:
    return (
        "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
        "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}" + calls + "{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )


QWEN3_5 = _chatml(
    "{{- '<tool_call>\n<function=' + call.name + '>\n' }}"
    "{%- for key, value in call.arguments | items %}"
    "{{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}"
)
GLM4MOE = _chatml(
    "{{- '<tool_call>' + call.name + '\n' }}"
    "{%- for key, value in call.arguments.items() %}"
    "{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value | string) + '</arg_value>\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}"
)
LFM2 = _chatml(
    "{{- '<|tool_call_start|>[' + call.name + '(' }}"
    "{%- for key, value in call.arguments.items() %}{{- ', ' if not loop.first }}"
    "{{- key + '=' + (\"'\" + value + \"'\" if value is string else value | tojson) }}{%- endfor %}"
    "{{- ')]<|tool_call_end|>' }}"
)
LFM2_WITHOUT_CALLS = _chatml("")
HARMONY = """
{{- '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set called.name = message.tool_calls[0].function.name %}
        {%- if message.content and message.thinking %}{{- raise_exception('not both') }}{%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set called.name = none %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if called.name is none %}{{- raise_exception('there was no call before') }}{%- endif %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}
"""
SEED = """
{%- for message in messages %}
    {{- '<seed:bos>' + message.role + '\n' }}
    {%- if message.reasoning_content %}{{- '<seed:think>' + message.reasoning_content + '</seed:think>' }}{%- endif %}
    {{- (message.content | trim if message.role == 'assistant' else message.content) + '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<seed:bos>assistant\n' }}{%- endif %}
"""
_GEMMA4_THOUGHTS = """
{%- macro strip_thinking(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set ns.result = ns.result + part.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
"""
_GEMMA4_CALLS = """
    {%- for call in message.tool_calls or [] -%}
        {{- '<|tool_call>call:' + call.function.name + '{' -}}
        {%- for key, value in call.function.arguments | dictsort -%}{{- ',' if not loop.first -}}
            {{- key + ':' + ('<|"|>' + value + '<|"|>' if value is string else value | string) -}}
        {%- endfor -%}
        {{- '}<tool_call|>' -}}
    {%- endfor -%}
"""
_GEMMA4_TOOLS = "{%- if tools -%}{{- '<|turn>system\n<|tool>' + (tools | tojson) + '<tool|><turn|>\n' -}}{%- endif -%}"
GEMMA4_FIRST = (
    _GEMMA4_THOUGHTS
    + _GEMMA4_TOOLS
    + """
{%- for message in messages -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
"""
    + _GEMMA4_CALLS
    + """
    {{- strip_thinking(message.content) if message.role == 'assistant' else message.content -}}
    {{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\n<|channel>thought\n<channel|>' -}}{%- endif -%}
"""
)
"""The first published version: results are turns, and a prompt ends with an empty thought."""
GEMMA4 = (
    _GEMMA4_THOUGHTS
    + _GEMMA4_TOOLS
    + """
{%- set ns = namespace(last=none, user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}{%- if message.role != 'tool' -%}
    {%- if not (message.role == 'assistant' and ns.last in ('called', 'answered', 'said')) -%}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {%- endif -%}
    {%- set place = loop.index0 -%}
    {%- if message.reasoning_content and place > ns.user and message.tool_calls -%}
        {{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' -}}
    {%- endif -%}
"""
    + _GEMMA4_CALLS
    + """
    {%- set ns.last = 'called' if message.tool_calls else 'said' if message.role == 'assistant' else none -%}
    {%- set scan = namespace(stopped=not message.tool_calls) -%}
    {%- for follow in messages[place + 1:] -%}
        {%- if follow.role != 'tool' -%}{%- set scan.stopped = true -%}{%- endif -%}
        {%- if not scan.stopped -%}
            {%- set name = namespace(of=follow.name) -%}
            {%- for call in message.tool_calls if call.id and call.id == follow.tool_call_id -%}
                {%- set name.of = call.function.name -%}
            {%- endfor -%}
            {{- '<|tool_response>response:' + name.of + '{value:<|"|>' + follow.content + '<|"|>}<tool_response|>' -}}
            {%- set ns.last = 'answered' -%}
        {%- endif -%}
    {%- endfor -%}
    {{- strip_thinking(message.content) if message.role == 'assistant' else message.content -}}
    {%- if ns.last == 'called' -%}{{- '<|tool_response>' -}}
    {%- elif ns.last != 'answered' or message.content -%}{{- '<turn|>\n' -}}{%- endif -%}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt and ns.last not in ('called', 'answered') -%}{{- '<|turn>model\n' -}}{%- endif -%}
"""
)
"""A later version: results follow their call in its turn, and thoughts before calls are kept until the user's turn."""
NEMOTRON_3 = """
{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- if '<think>' not in content and '</think>' not in content %}
            {%- set content = '<think></think>' + content %}
        {%- endif %}
        {%- if loop.index0 < ns.user and '<think>' in content and '</think>' in content %}
            {%- set content = '<think></think>' + content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content | trim + ('\n' if message.tool_calls and message.content else '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>\n' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""
_GEMMA4_TOKENS = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", '<|"|>', "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
)
_HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_LFM2_TOKENS = (*_IM, "<|tool_call_start|>", "<|tool_call_end|>")

_FAMILIES = {
    "qwen3_5": (QWEN3_5, _IM, "<|im_end|>"),
    "glm4moe": (GLM4MOE, _IM, "<|im_end|>"),
    "lfm2": (LFM2, _LFM2_TOKENS, "<|im_end|>"),
    "lfm2-without-calls": (LFM2_WITHOUT_CALLS, _LFM2_TOKENS, "<|im_end|>"),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"), "</s>"),
    "seed-oss": (SEED, ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>"), "<seed:eos>"),
    "gemma4": (GEMMA4, _GEMMA4_TOKENS, "<turn|>"),
    "gemma4-first": (GEMMA4_FIRST, _GEMMA4_TOKENS, "<turn|>"),
    "nemotron_3": (NEMOTRON_3, (*_IM, "<think>", "</think>"), "<|im_end|>"),
    "gpt-oss": (HARMONY, _HARMONY_TOKENS, "<|return|>"),
}


@lru_cache
def reply_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a family."""
    template, specials, eos = _FAMILIES[family]
    return byte_tokenizer(template, specials, eos=eos, bos="<s>" if "<s>" in specials else None)
