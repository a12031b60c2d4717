"""The fast encoding gives what the library gives, on every vocabulary for which it is taken."""

import json
import unicodedata
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import qwen_folder
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from areal_agents.rendering import Tokenizer
from areal_agents.rendering.tokenization.byte_bpe import ByteBpe, proven_byte_bpe, tables_of
from areal_agents.rendering.tokenization.byte_bpe_patterns import ALTERNATIVES, SAMPLE

# Llama 3's and GLM-4's.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\n| "
QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|end|>", "<|end|>x", "<think>", "｜mark｜"]
KINDS = ["qwen", "llama", "words", "marks", "gpt2"]


def trained(pattern: str | None, normalizer: Any = None) -> tokenizers.Tokenizer:
    """A byte-level BPE of 1,024 tokens, cut by `pattern`, or by GPT-2's own."""
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
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
    """The same vocabulary as Llama 3 writes it: all splits are merges, and whole tokens need none."""
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


def proven(backend: tokenizers.Tokenizer, **changes: Any) -> ByteBpe | None:
    data = json.loads(backend.to_str())
    data["model"] |= changes
    tables = tables_of(data)
    return None if tables is None else proven_byte_bpe(backend, tables)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[tokenizers.Tokenizer, ByteBpe]]:
    backends = {
        "qwen": tokenizers.Tokenizer.from_file(str(qwen_folder("qwen3") / "tokenizer.json")),
        "llama": with_every_split(trained(LLAMA)),
        "words": trained(WORDS),
        "marks": trained(QWEN_35, normalizers.NFC()),
        "gpt2": trained(None),
    }
    pairs = {}
    for kind, backend in backends.items():
        fast = proven(backend)
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
def test_any_text_has_the_librarys_ids(made: Any, kind: str, parts: list[str]) -> None:
    backend, fast = made[kind]
    text = "".join(parts)
    ids = fast.encode(text)
    if ids is not None:
        assert ids == library_ids(backend, text)
        assert fast.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    elif text.isascii():
        assert kind == "words", "plain text has to be fast"  # that pattern has no place for a tab


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_have_the_librarys_text(made: Any, kind: str, data: st.DataObject) -> None:
    backend, fast = made[kind]
    size = backend.get_vocab_size(with_added_tokens=True)
    ids = data.draw(st.lists(st.one_of(st.integers(0, 255), st.integers(0, size - 1)), max_size=12))
    assert fast.decode(ids) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_cut_as_the_library_cuts_it(made: Any, kind: str) -> None:
    backend, fast = made[kind]
    taken = 0
    for first in range(0, 0x20000, 64):
        block = [chr(c) for c in range(first, first + 64) if not 0xD800 <= c < 0xE000]
        sure = [c for c in block if unicodedata.category(c) != "Cn" and fast.encode(c) is not None]
        text = "".join(f"a{c}{c}1{c} {c}\n{c}'{c}" for c in sure)
        ids = fast.encode(text)
        if ids is None:  # neighbours that compose
            continue
        taken += len(sure)
        assert ids == library_ids(backend, text), hex(first)
    assert taken > 40_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", " ", "\n", " \n", "=-", "漢", "x1 ", "ab'"])
def test_long_runs_have_the_librarys_ids(made: Any, kind: str, unit: str) -> None:
    backend, fast = made[kind]
    text = unit * (100_000 // len(unit)) + "."
    assert fast.encode(text) == library_ids(backend, text)


@pytest.mark.parametrize(
    "text", ["e\u0301", "\u212b", "\ud800", "a\udfff", "\U0001e900", "\u0300\u0378", "x" * 500_001]
)
def test_texts_that_are_the_librarys(made: Any, text: str) -> None:
    assert made["marks"][1].encode(text) is None


def test_what_no_pattern_matches_is_not_lost(made: Any) -> None:
    backend, fast = made["words"]
    assert fast.encode("a b") == library_ids(backend, "a b")
    assert fast.encode("a\tb") is None


def test_added_tokens_are_found_the_longest_first(made: Any) -> None:
    backend, fast = made["words"]
    ids = fast.encode("a<|end|>x<|end|><|end|>")
    assert ids is not None and len(ids) == 4
    assert ids == library_ids(backend, "a<|end|>x<|end|><|end|>")


def test_ids_that_do_not_exist_are_the_librarys(made: Any) -> None:
    assert made["words"][1].decode([5, 10_000_000]) is None
    assert made["words"][1].decode([-1]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1},
        {"byte_fallback": True},
        {"continuing_subword_prefix": "##"},
        {"ignore_merges": True},  # merges that are not all splits
    ],
)
def test_other_models_are_not_taken(change: dict[str, Any]) -> None:
    assert proven(trained(WORDS), **change) is None


def test_merges_out_of_order_are_not_taken() -> None:
    backend = trained(WORDS)
    merges = json.loads(backend.to_str())["model"]["merges"]
    assert proven(backend, merges=[*merges[1:], merges[0]]) is None


def test_a_token_that_its_own_bytes_do_not_give_is_not_taken() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*letters, "ab", "bc", "abc"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c"), ("a", "bc")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    assert len(library_ids(backend, "abc")) == 2
    assert proven(backend) is None


@pytest.mark.parametrize("name", ["normalizer", "pre_tokenizer", "decoder", "pattern", "added"])
def test_other_parts_are_not_taken(name: str) -> None:
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
    assert proven(backend) is None


def test_a_folders_tokenizer_takes_both_ways() -> None:
    folder = qwen_folder("qwen3")
    tokenizer = Tokenizer.from_folder(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("plain<|im_end|>", "cafe\u0301", SAMPLE):
        ids = tokenizer.encode(text)
        assert ids == library_ids(backend, text)
        assert tokenizer.decode(np.array(ids)) == backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == backend.decode(ids)
    assert tokenizer.decode([0, 10_000_000]) == "!"


def test_an_older_file_is_read_alike() -> None:
    backend = trained(None)
    data = json.loads(backend.to_str())
    del data["pre_tokenizer"]["use_regex"]
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    tables = tables_of(data)
    assert tables is not None
    assert proven_byte_bpe(tokenizers.Tokenizer.from_str(json.dumps(data)), tables) is not None
