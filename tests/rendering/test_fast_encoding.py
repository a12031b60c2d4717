"""The fast encoding returns what the `tokenizers` library returns, wherever it is used."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import qwen_folder
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from areal_agents.rendering import Tokenizer
from areal_agents.rendering.tokenization.fast_encoding import (
    ALTERNATIVES,
    SAMPLE,
    FastEncoding,
    fast_encoding,
    is_supported,
)

# The pattern of Llama 3 and GLM-4.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA.replace(r"\p{N}{1,3}", r"\p{N}")
O200 = (  # GPT-4o and gpt-oss
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\n| "
QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|end|>", "<|end|>x", "<think>", "｜mark｜"]
KINDS = ["qwen", "llama", "words", "marks", "gpt2"]


def split_by(pattern: str | None) -> Any:
    """The pre-tokenizer of a pattern; None: that of GPT-2."""
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_letters() -> list[str]:
    """The characters that byte-level BPE uses for the 256 bytes."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def trained(pattern: str | None, normalizer: Any = None) -> tokenizers.Tokenizer:
    """A byte-level BPE of 1,024 tokens, which splits text by `pattern`; None: as GPT-2 does."""
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split_by(pattern)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE, SAMPLE.lower(), *SAMPLE.split("\n")], trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return backend


def with_every_split(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary as Llama 3 writes it: every split of a token is a merge; whole tokens need none."""
    data = json.loads(backend.to_str())
    vocabulary = data["model"]["vocab"]
    merges = [
        [token[:cut], token[cut:]]
        for token in sorted(vocabulary, key=vocabulary.get)
        if token not in SPECIAL
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    data["model"] |= {"merges": merges, "ignore_merges": True}
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def fast_of(backend: tokenizers.Tokenizer, **changes: Any) -> FastEncoding | None:
    """The fast encoding of a tokenizer with changed model settings, as `Tokenizer.from_folder` reads it."""
    settings = json.loads(backend.to_str())
    settings["model"] |= changes
    return fast_of_settings(settings, backend)


def fast_of_settings(settings: dict[str, Any], backend: tokenizers.Tokenizer) -> FastEncoding | None:
    if not is_supported(settings):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(settings))
        return fast_encoding(file, backend)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[tokenizers.Tokenizer, FastEncoding]]:
    backends = {
        "qwen": tokenizers.Tokenizer.from_file(str(qwen_folder("qwen3") / "tokenizer.json")),
        "llama": with_every_split(trained(LLAMA)),
        "words": trained(WORDS),
        "marks": trained(QWEN_35, normalizers.NFC()),
        "gpt2": trained(None),
    }
    pairs = {}
    for kind, backend in backends.items():
        fast = fast_of(backend)
        assert fast is not None, kind
        pairs[kind] = (backend, fast)
    return pairs


def library_ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


PIECES = st.one_of(
    st.text(max_size=12),
    st.sampled_from([*SAMPLE.split("\n"), *SAMPLE.split(" "), *SPECIAL, "<|im_end|>", "<think>", "<|en"]),
    st.text(alphabet=" \t\n\r\u00a0\u3000\u2028", max_size=12),
    st.text(alphabet="0123456789١٢½Ⅷ", max_size=8),
    st.text(alphabet="aeoucAEO\u0301\u0308\u0323\u1100\u1161\u11a8\ufb01", max_size=8),
    st.text(alphabet="'sStTrReEvVmMlLdDſK", max_size=6),
    st.text(alphabet="😀👩\u200d🏽🇩🇪❤\ufe0f漢字かな한𝔘", max_size=8),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None)
@given(parts=st.lists(PIECES, max_size=8))
def test_any_string_is_encoded_as_by_the_library(made: Any, kind: str, parts: list[str]) -> None:
    backend, fast = made[kind]
    text = "".join(parts)
    ids = fast.encode(text)
    if ids is None:
        assert "\u180e" in text or any("\ud800" <= one < "\ue000" for one in text)
    else:
        assert ids == library_ids(backend, text)
        assert ids == fast.encode(text, mark="\ufdd0")
        assert fast.decode(ids) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_are_decoded_as_by_the_library(made: Any, kind: str, data: st.DataObject) -> None:
    backend, fast = made[kind]
    size = backend.get_vocab_size(with_added_tokens=True)
    ids = data.draw(st.lists(st.one_of(st.integers(0, 255), st.integers(0, size - 1)), max_size=12))
    assert fast.decode(ids) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "pattern",
    [QWEN, *(pytest.param(other, marks=pytest.mark.slow) for other in (None, LLAMA, WORDS, QWEN_35, O200))],
)
def test_every_character_is_split_as_the_library_splits_it(pattern: str | None) -> None:
    """Any two adjacent bytes merge in this vocabulary, so every split is visible in the ids."""
    letters = byte_letters()
    pairs = [(one, then) for one in letters for then in letters]
    vocabulary = {token: at for at, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = split_by(pattern)
    backend.decoder = decoders.ByteLevel()
    fast = fast_of(backend)
    assert fast is not None
    for first in range(0, 0x20000, 128):
        block = [chr(c) for c in range(first, first + 128) if not 0xD800 <= c < 0xE000 and c != 0x180E]
        text = "\n\n".join(f"a{c}{c}1{c} {c}\n{c}'{c}${c}a {c}S\u0301{c}K" for c in block)
        assert fast.encode(text) == library_ids(backend, text), hex(first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", " ", "\n", " \n", "=-", "漢", "x1 ", "ab'"])
def test_long_repetitions_are_encoded_as_by_the_library(made: Any, kind: str, unit: str) -> None:
    backend, fast = made[kind]
    text = unit * (100_000 // len(unit)) + "."
    assert fast.encode(text) == library_ids(backend, text)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "a\u180e"])
def test_surrogates_and_an_ambiguous_space_are_left_to_the_library(made: Any, text: str) -> None:
    assert made["marks"][1].encode(text) is None


def test_the_longest_added_token_is_found_first(made: Any) -> None:
    backend, fast = made["words"]
    ids = fast.encode("a<|end|>x<|end|><|end|>")
    assert ids is not None and len(ids) == 4
    assert ids == library_ids(backend, "a<|end|>x<|end|><|end|>")


def test_marked_special_tokens_are_encoded_as_text(made: Any) -> None:
    backend, fast = made["words"]
    ids = fast.encode("a<\ufdd0|end|><think>b", mark="\ufdd0")
    assert ids == [
        *fast.encode("a<|"),
        *fast.encode("end|>"),
        backend.token_to_id("<think>"),
        *fast.encode("b"),
    ]
    assert fast.decode(ids) == "a<|end|><think>b"


def test_an_unknown_id_is_left_out_as_by_the_library(made: Any) -> None:
    backend, fast = made["words"]
    assert fast.decode([5, 10_000_000]) == backend.decode([5, 10_000_000], skip_special_tokens=False)


@pytest.mark.parametrize(
    "change", [{"dropout": 0.1}, {"byte_fallback": True}, {"continuing_subword_prefix": "##"}]
)
def test_unsupported_models_have_no_fast_encoding(change: dict[str, Any]) -> None:
    assert fast_of(trained(WORDS), **change) is None


def odd_vocabulary(name: str, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A vocabulary whose ids are not in the order of merges, or with tokens that their bytes do not give."""
    data = json.loads(backend.to_str())
    if name == "merges out of order":
        first, *rest = data["model"]["merges"]
        data["model"]["merges"] = [*rest, first]
        return tokenizers.Tokenizer.from_str(json.dumps(data))
    if name == "whole tokens":
        data["model"]["ignore_merges"] = True
        return tokenizers.Tokenizer.from_str(json.dumps(data))
    assert name == "a token that its bytes do not give"
    vocabulary = {text: i for i, text in enumerate([*byte_letters(), "ab", "bc", "abc"])}
    unmade = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c"), ("a", "bc")]))
    unmade.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    unmade.decoder = decoders.ByteLevel()
    assert len(library_ids(unmade, "abc")) == 2
    return unmade


@pytest.mark.parametrize(
    "name", ["merges out of order", "whole tokens", "a token that its bytes do not give"]
)
def test_unusual_vocabularies_are_encoded_as_by_the_library(made: Any, name: str) -> None:
    backend = odd_vocabulary(name, made["words"][0])
    fast = fast_of(backend)
    assert fast is not None
    for text in (SAMPLE, SAMPLE.lower(), "abc bc ab cab abcabc"):
        assert fast.encode(text.replace("\u180e", "")) == library_ids(backend, text.replace("\u180e", ""))


@pytest.mark.parametrize("name", ["normalizer", "pre_tokenizer", "decoder", "pattern", "added"])
def test_unsupported_parts_of_a_tokenizer_have_no_fast_encoding(name: str) -> None:
    backend = trained(WORDS)
    if name == "normalizer":
        backend.normalizer = normalizers.NFKC()
    elif name == "pre_tokenizer":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif name == "decoder":
        backend.decoder = decoders.Metaspace()
    elif name == "pattern":
        assert r"\w+" not in ALTERNATIVES
        backend = trained(r"\w+|\W+")
    else:
        backend.add_tokens([AddedToken("<wide>", lstrip=True, normalized=False)])
    assert fast_of(backend) is None


def test_the_tokenizer_of_a_folder_encodes_and_decodes_as_the_library() -> None:
    folder = qwen_folder("qwen3")
    tokenizer = Tokenizer.from_folder(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("plain<|im_end|>", "cafe\u0301", SAMPLE):
        ids = tokenizer.encode(text)
        assert ids == library_ids(backend, text)
        assert tokenizer.decode(np.array(ids)) == backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == backend.decode(ids)
    assert tokenizer.decode([0, 10_000_000]) == "!"


def test_a_file_in_the_older_format_is_supported() -> None:
    backend = trained(None)
    data = json.loads(backend.to_str())
    del data["pre_tokenizer"]["use_regex"]
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    assert fast_of_settings(data, tokenizers.Tokenizer.from_str(json.dumps(data))) is not None
