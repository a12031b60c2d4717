"""Chat templates with different conventions, and a small model folder for any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
]

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""

# Tool calls in the Hermes format; lines and blocks are trimmed by the environment, not by dashes.
HERMES = """\
{% if tools %}
<|im_start|>system
{% for tool in tools %}
{{ tool | tojson(indent=2) }}
{% endfor %}
<|im_end|>
{% endif %}
    {% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}
        {% for call in message.tool_calls or [] %}
            {%- set function = call.function %}
<tool_call>
{{ {'name': function.name, 'arguments': function.arguments} | tojson }}
</tool_call>
        {% endfor %}
<|im_end|>
    {% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

# Writes the tools before the last question, the system prompt inside it, and calls one after another.
INST = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list -%}
{%- for message in turns -%}
    {%- if message.role == 'user' -%}
        {%- if tools and message is sameas questions[-1] -%}{{- 'TOOLS ' ~ (tools | tojson) -}}{%- endif -%}
        {{- '[INST] ' ~ (system ~ '\\n\\n' if system and loop.last else '') ~ message.content ~ '[/INST]' -}}
    {%- elif message.tool_calls -%}
        {%- for call in message.tool_calls -%}
            {{- ' CALL ' ~ call.function.name ~ call.function.arguments | tojson -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' ~ message.content ~ eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '[RESULT] ' ~ message.content -}}
    {%- else -%}
        {{- raise_exception('a system message comes first') -}}
    {%- endif -%}
{%- endfor -%}
"""

# Trims contents, requires roles to alternate, and puts the system prompt into the first question.
ALTERNATING = """\
{{- bos_token -}}
{%- set first = messages[0].content | trim ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if first else messages -%}
{%- for message in turns -%}
    {%- if message.role != ['user', 'assistant'][loop.index0 % 2] -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' -}}
    {{- (first if loop.first else '') ~ message.content | trim ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>model\\n' -}}{%- endif -%}
"""

# Closes replies with a token that is not the end-of-text token; marks replies for training code.
GENERATION = """\
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|assistant|>\\n' -}}
        {%- generation -%}{{- message.content ~ '<|end|>\\n' -}}{%- endgeneration -%}
    {%- elif message.role == 'ignored' -%}
        {%- continue -%}
    {%- else -%}
        {{- '<|user|>\\n' ~ message.content ~ '<|end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt -}}
"""

DATED_HEAD = "{{- 'Today is ' ~ strftime_now('%d %B %Y %H:%M:%S') ~ '.\\n' -}}" + CHATML

OPTION = "{{- 'Be terse.\\n' if style == 'terse' -}}" + CHATML


def with_header(extra: str) -> str:
    """CHATML with an additional expression in the header of each message that is not a reply."""
    written = f"message.role ~ ({extra} if message.role != 'assistant' else '') ~"
    return CHATML.replace("message.role ~", written)


NUMBERED = with_header("' ' ~ loop.index")
STAMPED = with_header("strftime_now(' %H:%M:%S')")
COUNTED_DOWN = with_header("' ' ~ loop.revindex")
LAST_QUESTION = with_header("(' now' if loop.last else '')")
# Writes the tools into the newest user message, so that they move there from the earlier one.
WANDERING_TOOLS = (
    "{%- set asked = messages | selectattr('role', 'equalto', 'user') | list | last -%}"
    + CHATML.replace(
        "message.content", "(tools | tojson if message is sameas asked and tools else '') ~ message.content"
    )
)
WINDOW = CHATML.replace("in messages", "in messages[-20:]")
UNCLOSED = CHATML.replace("<|im_end|>", "")
NO_PROMPT = CHATML.split("{{- '<|im_start|>assistant")[0]
STRICT_SYSTEM = CHATML.replace(
    "in messages -%}",
    "in messages -%}{{- raise_exception('late') if message.role == 'system' and not loop.first -}}",
)
DROPS_REASONING = "{#- </think> -#}" + CHATML
# Writes the name of the called function into a result; only the history contains it.
NAMED_RESULTS = "{% set seen = namespace(call='') %}" + HERMES.replace(
    "{{ message.content }}\n", "{{ seen.call if message.role == 'tool' }} {{ message.content }}\n"
).replace("{%- set function", "{%- set seen.call = call.function.name %}{%- set function")
# Leaves out the content of replies that have calls.
SILENT_CALLS = HERMES.replace(
    "{{ message.content }}\n", "{{ '' if message.tool_calls else message.content }}\n\n"
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, and those of `SPECIAL`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer


def sentence_tokenizer(prepend_scheme: str) -> Tokenizer:
    """A tokenizer with one token per byte or word boundary; special tokens absorb the space after them."""
    letters = ["<unk>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        {letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, rstrip=True) for text in SPECIAL])
    return tokenizer


def write_folder(
    folder: Path,
    template: Any,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Path:
    """Write a model folder with this chat template and a byte tokenizer, or the given one."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of", **(config or {})}))
    names = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}))
    return folder
