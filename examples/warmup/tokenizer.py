"""A small byte-level BPE in Qwen3's form.

Three regular expressions say what a token may span. With `DIGITS` every space and every digit is a token of
its own, so a name has the same tokens in prose, in a question and inside the JSON of a call; with GPT-style
splitting (" Ghazni" against "\\"Ghazni") copying does not generalise. `WHOLE_NUMBERS` is for tasks that copy
nothing but numbers: a number that occurs often in the texts is one token, and a word is joined with the space
before it. `PHRASES` merges across spaces too, as in SuperBPE (arXiv 2503.13423): a sentence that occurs often
is one token, and each digit is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|im_end|>"
MARKERS = (END_OF_TEXT, "<|im_start|>", TURN_END)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCAB_SIZE = 1024
DIGITS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s"
PHRASES = r"\p{N}|[^\p{N}\n]+|\n"
WHOLE_NUMBERS = r" ?\p{L}+|\p{N}+|=|[^\s\p{L}\p{N}=]+|\s"

# The part of Qwen3's chat template that this model was trained on: tools, calls and their results.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments " }}
    {{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE, pieces: str = DIGITS) -> Tokenizer:
    """Learn the merges within `pieces` from `texts`, which contain no markers; their ids come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_marker(text) for text in MARKERS + TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"expected {vocab_size} tokens, the texts gave {tokenizer.get_vocab_size()}")
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return the same tokenizer before any merge: one token for each byte, and the markers."""
    return train_tokenizer([], vocab_size=256 + len(MARKERS + TAGS))


def without_markers(text: str) -> str:
    """Return the text without its markers and tags, as `train_tokenizer` needs it."""
    for marker in MARKERS + TAGS:
        text = text.replace(marker, "")
    return text


def prefix_text(prefix: Callable[[Tokenizer], Sequence[int]]) -> str:
    """Return the text, without markers, of the ids that `prefix` gives with a tokenizer of single bytes."""
    plain = byte_tokenizer()
    return without_markers(plain.decode(prefix(plain), skip_special_tokens=False))


def marker_id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a marker or tag. Raises ValueError if this tokenizer has none."""
    token_id = tokenizer.token_to_id(text)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {text!r}")
    return token_id


def _marker(text: str) -> AddedToken:
    """Tags survive decoding with skip_special_tokens, as in Qwen3; chat markers do not."""
    return AddedToken(text, normalized=False, special=text in MARKERS)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
