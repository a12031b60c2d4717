"""Renderers of the library's families over a small tokenizer that has each family's special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import renderers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from areal_agents.rendering import ChatRenderer, Tokenizer

_CORPUS = [
    "system user assistant tool search for the capital of the country where Lyon is",
    '{"name": "search", "arguments": {"query": "capital of France", "limit": 3}}',
    "<think> </think> <tool_call> </tool_call>",
]
_IM = ["<|im_start|>", "<|im_end|>"]
_THINK = ["<think>", "</think>"]
_CALLS = ["<tool_call>", "</tool_call>"]
_RESULTS = ["<tool_response>", "</tool_response>"]
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_ARGUMENTS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_QWEN = [*_IM, *_THINK, *_CALLS, *_RESULTS, *_VISION]
_DEEPSEEK = [
    *(f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")),
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
]
_DEEPSEEK_V4 = [
    *_DEEPSEEK[:4],
    *_THINK,
    "｜DSML｜",
    *(f"<｜{name}｜>" for name in ("latest_reminder", "action", "query", "authority", "domain")),
    *(f"<｜{name}｜>" for name in ("title", "read_url")),
]
_GLM = [
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *_THINK,
    *_CALLS,
    *_RESULTS,
    *_ARGUMENTS,
]
_KIMI = [
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
]
_HY = [
    *(f"<｜hy_{name}:opensource｜>" for name in ("begin_of_sentence", "eos", "User", "Assistant")),
    "<｜reasoning_mode:opensource｜>",
    *(f"<{name}:opensource>" for name in ("think", "/think", "tool_calls", "/tool_calls")),
    *(f"<{name}:opensource>" for name in ("tool_call", "/tool_call", "tool_sep")),
    *(f"<{name}:opensource>" for name in ("arg_key", "/arg_key", "arg_value", "/arg_value")),
    *(f"<{name}:opensource>" for name in ("tool_responses", "/tool_responses")),
    *(f"<{name}:opensource>" for name in ("tool_response", "/tool_response")),
]
_INKLING = [
    *(f"<|message_{name}|>" for name in ("user", "model", "system", "tool")),
    *(f"<|content_{name}|>" for name in ("text", "thinking", "image", "audio_input", "xml")),
    *(f"<|content_{name}|>" for name in ("invoke_tool_json", "invoke_tool_text", "model_end_sampling")),
    *("<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>"),
]
_GEMMA = [
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|image>", "<|image|>", "<image|>"),
]
_LLAMA = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
]
_LAGUNA = ["〈|EOS|〉", *_THINK, "<assistant>", "</assistant>", *_CALLS]
_MINIMAX = ["]~!b[", "]~b]", "[e~[", *_THINK, "<minimax:tool_call>", "</minimax:tool_call>"]

# gpt-oss is left out: its format needs a vocabulary that the library downloads.
SPECIAL_TOKENS: dict[str, list[str]] = {
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v4": _DEEPSEEK_V4,
    "gemma4": _GEMMA,
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "hy3": _HY,
    "inkling": _INKLING,
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "laguna-m.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-xs.2": _LAGUNA,
    "llama-3": _LLAMA,
    "minimax-m2": _MINIMAX,
    "nemotron-3": _QWEN,
    "nemotron-3-ultra": _QWEN,
    "nemotron-3.5": _QWEN,
    "prime-qwen3": _QWEN,
    "qwen3": _QWEN,
    "qwen3-vl": _QWEN,
    "qwen3.5": _QWEN,
    "qwen3.6": _QWEN,
    "qwen3.8": _QWEN,
}


def tiny_tokenizer(special: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of some 400 tokens and the given special ones."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ["<|endoftext|>", *special]])
    return Tokenizer(backend, name_or_path="tiny", eos_token="<|endoftext|>")


@cache
def family_renderer(family: str, **options: Any) -> ChatRenderer:
    """A renderer of one of SPECIAL_TOKENS' families, with template options."""
    config = type(renderers.config_from_name(family))(**options)
    return ChatRenderer.from_config(tiny_tokenizer(SPECIAL_TOKENS[family]), config)
