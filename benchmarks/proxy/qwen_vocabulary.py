"""Model folders with the real Qwen vocabulary, without weights and without a download.

The byte-pair ranks come from the `dashscope` package. A folder is built once per machine and kept in the
system's temporary folder under a name that depends on this file and on the ranks.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from areal_agents.errors import ConfigError

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of their ids, which follow the byte-pair vocabulary without a gap.
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
QWEN3_MARKERS = ["<tool_response>", "</tool_response>", "<think>", "</think>"]

_TOOLS = """\
{%- macro tool_list() -%}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) -}}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' -}}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' -}}
{%- endmacro -%}
{%- macro call_block(call) -%}
    {%- set function = call.function or call -%}
    {{- '<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' -}}
    {{- function.arguments if function.arguments is string and STRINGS else function.arguments | tojson -}}
    {{- '}\\n</tool_call>' -}}
{%- endmacro -%}
{%- macro tool_result(index) -%}
    {%- if index == 0 or messages[index - 1].role != 'tool' %}{{- '<|im_start|>user' -}}{%- endif %}
    {{- '\\n<tool_response>\\n' ~ messages[index].content ~ '\\n</tool_response>' -}}
    {%- if index + 1 == messages | length or messages[index + 1].role != 'tool' -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endmacro -%}
"""

QWEN2_TEMPLATE = (
    _TOOLS.replace(" and STRINGS", " and false")
    + """\
{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -%}
{%- set system = messages[0].content if messages[0].role == 'system' else default -%}
{{- '<|im_start|>system\\n' ~ system ~ ('\\n\\n' ~ tool_list() if tools else '') ~ '<|im_end|>\\n' -}}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- tool_result(loop.index0) -}}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' ~ message.role -}}
        {{- '\\n' ~ message.content if message.content or not message.tool_calls -}}
        {%- for call in message.tool_calls or [] %}{{- '\\n' ~ call_block(call) -}}{%- endfor %}
        {{- '<|im_end|>\\n' -}}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
)

QWEN3_TEMPLATE = (
    _TOOLS.replace(" and STRINGS", "")
    + """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' -}}
    {{- system ~ ('\\n\\n' if tools and messages[0].role == 'system' else '') -}}
    {{- (tool_list() if tools else '') ~ '<|im_end|>\\n' -}}
{%- endif %}
{%- set query = namespace(last=messages | length - 1) -%}
{%- for message in messages %}
    {%- if message.role == 'user' and message.content is string
            and not (message.content.startswith('<tool_response>')
                     and message.content.endswith('</tool_response>')) %}
        {%- set query.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'tool' %}
        {{- tool_result(loop.index0) -}}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' -%}
        {%- if not reasoning and '</think>' in content %}
            {%- set parts = content.split('</think>') -%}
            {%- set reasoning = ((parts | first).rstrip('\\n').split('<think>') | last).lstrip('\\n') -%}
            {%- set content = (parts | last).lstrip('\\n') -%}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if loop.index0 > query.last and (loop.last or reasoning) %}
            {{- '<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') -}}
        {%- else %}
            {{- content -}}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n' if content or not loop.first else '') ~ call_block(call) -}}
        {%- endfor %}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' -}}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false -}}
{%- endif %}
"""
)

_TEMPLATES = {"qwen2": QWEN2_TEMPLATE, "qwen3": QWEN3_TEMPLATE}


def qwen_folder(model_type: str = "qwen3") -> Path:
    """The folder of a Qwen model without weights; built on first use, then shared by every process.

    Args:
        model_type: "qwen3" (151,669 tokens), or "qwen2" for Qwen2.5 (151,665 tokens), whose template the
            `renderers` library does not know.
    """
    if model_type not in _TEMPLATES:
        raise ValueError(f"model_type must be one of {sorted(_TEMPLATES)}, got {model_type!r}")
    ranks = _rank_file()
    version = hashlib.sha256(Path(__file__).read_bytes() + ranks.read_bytes()).hexdigest()[:16]
    home = Path(tempfile.gettempdir()) / f"areal-agents-tokenizers-{os.getuid()}"
    folder = home / f"{model_type}-{version}"
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=home))
        try:
            _write(building, model_type, ranks)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _publish(building: Path, folder: Path) -> None:
    """Give the complete folder its name, in one step; if another process was first, its folder is used
    instead."""
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _rank_file() -> Path:
    spec = importlib.util.find_spec("dashscope")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the real Qwen vocabulary comes from the dashscope package: pip install 'areal-agents[bench]'"
        )
    return Path(spec.origin).parent / "resources" / "qwen.tiktoken"


def _write(folder: Path, model_type: str, rank_file: Path) -> None:
    markers = MARKERS + (QWEN3_MARKERS if model_type == "qwen3" else [])
    _tokenizer(rank_file, markers).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _TEMPLATES[model_type],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))


def _tokenizer(rank_file: Path, markers: list[str]) -> Tokenizer:
    lines = (line.split() for line in rank_file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = _byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {written(token): rank for token, rank in ranks.items()}
    merges = [(written(left), written(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in markers])
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair of tokens from which each token of two or more bytes was merged, in the order of the ranks."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
            best = min(pairs)
            if best >= rank:
                raise ValueError(f"token {rank} of the rank file is not made of two earlier tokens")
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _byte_letters() -> list[str]:
    """Map each byte to the character that byte-level BPE writes for it: printable Latin-1 as itself, the rest
    from letter 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
