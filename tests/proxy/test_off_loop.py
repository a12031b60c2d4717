"""Long work runs in threads instead of the event loop, and is not repeated."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from proxy_support import MODEL, SEARCH, RunningProxy
from tokenizers import decoders, models, normalizers

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.lru import LruCache
from areal_agents.proxy.calls.prompts import Prompt, Prompts
from areal_agents.proxy.calls.raw_prompts import PlainStream, RawPrompts
from areal_agents.proxy.calls.request import RAW_TOOLS_ID, CompletedTurn, ModelRequest, SamplingWish
from areal_agents.proxy.dialects.chat.answers import chat_answer
from areal_agents.rendering import ChatRenderer, Tokenizer

USER = Message("user", "hi")


class CountingTokenizer(Tokenizer):
    """Counts the decoded tokens, and records the threads in which strings are encoded."""

    decodes: int
    decoded: int
    threads: set[int]

    def decode(self, token_ids: Any, **options: Any) -> str:
        self.decodes += 1
        self.decoded += len(token_ids)
        return super().decode(token_ids, **options)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, **options)

    def reset(self) -> None:
        self.decodes, self.decoded, self.threads = 0, 0, set()


@pytest.fixture(scope="module")
def shared_tokenizer() -> CountingTokenizer:
    CountingTokenizer.decodes, CountingTokenizer.decoded, CountingTokenizer.threads = 0, 0, set()
    made = CountingTokenizer.from_folder(MODEL)
    assert isinstance(made, CountingTokenizer)
    return made


@pytest.fixture
def tokenizer(shared_tokenizer: CountingTokenizer) -> CountingTokenizer:
    shared_tokenizer.reset()
    return shared_tokenizer


@pytest.fixture
def own_renderer(tokenizer: CountingTokenizer, renderer: ChatRenderer) -> ChatRenderer:
    made = ChatRenderer(tokenizer, renderer._format, family=renderer.family)
    tokenizer.reset()
    return made


@pytest.fixture
def prompts(own_renderer: ChatRenderer) -> Iterator[Prompts]:
    made = Prompts(own_renderer)
    yield made
    made.close()


def asked(*messages: Message, tools: tuple[dict[str, Any], ...] = (), raw: Any = None) -> ModelRequest:
    tools_id = RAW_TOOLS_ID if raw is not None else str(len(tools))
    return ModelRequest(messages or (USER,), tools, tools_id, SamplingWish(), raw_prompt=raw)


def prompt_of(prompts: Prompts, forest: Forest, request: ModelRequest) -> Prompt:
    return asyncio.run(prompts.prompt(forest, request, 10**6, most_tokens=10**6))


def turn(
    turn_id: str, parent: str | None, said: str, reply: str, encode: Callable[..., Any], **fields: Any
) -> Turn:
    ids = encode(reply)
    completion = Completion(ids, [-1.0] * len(ids), [0] * len(ids), "length")
    return Turn(
        id=turn_id,
        parent=parent,
        new_messages=(Message("user", said),),
        new_prompt_ids=encode(said),
        completion=completion,
        reply=Message("assistant", reply),
        sampling=fields.pop("sampling", SamplingParams(64)),
        **fields,
    )


def test_a_long_list_of_tools_is_rendered_in_a_thread(
    prompts: Prompts, own_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    render = own_renderer.render

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return render(*args, **options)

    monkeypatch.setattr(own_renderer, "render", watched)
    many = tuple(
        {"type": "function", "function": {**SEARCH["function"], "name": f"search{i}"}} for i in range(60)
    )
    prompt_of(prompts, Forest(), asked(tools=(SEARCH,)))
    prompt_of(prompts, Forest(), asked(tools=many))
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


def test_a_long_raw_prompt_is_encoded_in_a_thread(prompts: Prompts, tokenizer: CountingTokenizer) -> None:
    here = threading.get_ident()
    short = prompt_of(prompts, Forest(), asked(raw="word " * 50))
    assert tokenizer.threads == {here}
    tokenizer.reset()
    long = prompt_of(prompts, Forest(), asked(raw="word " * 5_000))
    assert tokenizer.threads and here not in tokenizer.threads
    assert len(long.ids) > 50 * len(short.ids)


def test_a_raw_reply_is_decoded_once_and_found_at_every_length(
    prompts: Prompts, tokenizer: CountingTokenizer
) -> None:
    """With a stop string, the whole text of a reply must be decoded from its tokens."""
    forest, whole, ends = Forest(), "", []
    for index in range(20):
        parent = f"t{index - 1}" if index else None
        said, reply = f" question {index}", f" answer {index}END"
        one = turn(
            f"t{index}", parent, said, reply, tokenizer.encode,
            tools_id=RAW_TOOLS_ID, sampling=SamplingParams(64, stop=("END",)),
        )  # fmt: skip
        forest.record(one)
        whole += said + reply
        ends.append(len(whole))
    tokenizer.reset()
    where = prompt_of(prompts, forest, asked(raw=whole + " more")).where
    assert where.parent is not None and where.parent.id == "t19" and where.new_messages[0].content == " more"
    assert tokenizer.decodes == 20
    for index, end in enumerate(ends[:-1]):  # just after a turn, and within the next question
        for cut in (end + 1, end + 5):
            found = prompt_of(prompts, forest, asked(raw=whole[:cut])).where
            assert found.parent is not None and found.parent.id == f"t{index}"
            assert found.new_messages[0].content == whole[end:cut]
    assert tokenizer.decodes == 20
    by_ids = tuple(forest.path("t7").token_ids.tolist())
    assert prompt_of(prompts, forest, asked(raw=(*by_ids, 5))).where.parent is forest["t7"]
    assert prompt_of(prompts, forest, asked(raw=by_ids)).where.parent is forest["t6"]  # t7 leaves no prompt
    asked_again = asked(raw=whole[: ends[7]] + " question 8")
    assert [turn.id for turn in prompts.answers(forest, asked_again)] == ["t8"]
    ids = tuple(forest.prompt_ids("t8").tolist())
    assert [turn.id for turn in prompts.answers(forest, asked(raw=ids))] == ["t8"]
    assert prompts.answers(forest, asked(raw=ids[:-1])) == ()


def test_candidates_of_a_second_search_are_found_in_one_pass(
    prompts: Prompts, tokenizer: CountingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forest, messages = Forest(), []
    for index in range(60):
        forest.record(turn(f"t{index}", f"t{index - 1}" if index else None, "a", "b", tokenizer.encode))
        messages += [Message("user", "a"), Message("assistant", "edited", handle=f"t{index}")]
    walked = []
    path = Forest.path
    monkeypatch.setattr(Forest, "path", lambda self, turn_id: walked.append(turn_id) or path(self, turn_id))
    request = ModelRequest((*messages, USER), (), "", SamplingWish())
    where = prompt_of(prompts, forest, request).where
    assert where.parent is None and where.fork is not None and where.fork.turn is not None
    assert "t59" in walked and len(walked) <= 8


def plain_texts(raw: RawPrompts, ids: list[int], rng: random.Random) -> tuple[list[str], str]:
    """Return the pieces of a completion that arrives in chunks of random lengths, and its whole text."""
    stream, pieces, start = PlainStream(raw), [], 0
    while start < len(ids):
        end = start + rng.choice([1, 1, 2, 3, 9, 40])
        pieces += [delta.text for delta in stream.feed(ids[start:end])]
        start = end
    pieces += [delta.text for delta in stream.finish()]
    return pieces, stream.message.content


def test_the_pieces_of_a_plain_reply_add_up_to_its_text(own_renderer: ChatRenderer) -> None:
    tokenizer, raw = own_renderer.tokenizer, RawPrompts(own_renderer)
    parts = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    stops = list(own_renderer.stop_token_ids)
    hearts = tokenizer.encode("naïve ♥ €uro 日本 🙂🙂 e\u0301")
    for seed in range(300):
        rng = random.Random(seed)
        sources: list[Callable[[], list[int]]] = [
            lambda rng=rng: [rng.randrange(tokenizer.vocab_size)],  # type: ignore[misc]
            lambda rng=rng: [rng.choice(parts)],  # type: ignore[misc]
            lambda rng=rng: hearts[: rng.randrange(len(hearts) + 1)],  # type: ignore[misc]
            lambda rng=rng: [rng.choice(stops)],  # type: ignore[misc]
        ]
        weights = [rng.random() for _ in sources]
        ids = [i for _ in range(60) for i in rng.choices(sources, weights)[0]()]
        pieces, whole = plain_texts(raw, ids, rng)
        assert "".join(pieces) == whole == raw.text_of(ids), (seed, ids)
    text_ids = tokenizer.encode("One two three, " * 10)
    assert len(plain_texts(raw, text_ids, random.Random(0))[0]) > 5  # it is streamed in pieces


def test_decoders_that_treat_the_first_token_differently() -> None:
    """A decoder like that of Llama 2 drops a leading space, and assembles characters from byte tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁b": 258, "</s>": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    class Renderer:
        tokenizer = Tokenizer(backend, name_or_path="made")
        stop_token_ids = (259,)

    raw = RawPrompts(Renderer())  # type: ignore[arg-type]
    ids = [256, 257, 256, 258, *"€€ 日本🙂".encode(), 256, 258, 257, *"é".encode(), 259]
    for seed in range(40):
        pieces, whole = plain_texts(raw, ids, random.Random(seed))
        assert "".join(pieces) == whole == "a  b€€ 日本🙂  baé"


@pytest.mark.parametrize("garbage", [False, True])
def test_the_cost_per_token_of_a_plain_reply_does_not_grow_with_its_length(
    own_renderer: ChatRenderer, tokenizer: CountingTokenizer, garbage: bool
) -> None:
    parts = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    words = tokenizer.encode("alpha € beta ")
    costs = []
    for count in (400, 1_600):
        source = itertools.cycle(parts if garbage else words)
        stream = PlainStream(RawPrompts(own_renderer))
        tokenizer.reset()
        for token_id in itertools.islice(source, count):
            stream.feed([token_id])
        stream.finish()
        costs.append(tokenizer.decoded / count)
    assert costs[1] < 1.1 * costs[0] and costs[1] < 40


def test_a_token_of_an_answer_is_decoded_once(tokenizer: CountingTokenizer) -> None:
    ids = tokenizer.encode("a b a b a b")
    best = tuple(tuple((token_id, -1.0) for token_id in (ids[0], ids[1], 7)) for _ in ids)
    completion = Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop", best)
    made = turn("chatcmpl-1", None, "x", "a", tokenizer.encode)
    made = Turn(
        "chatcmpl-1", None, made.new_messages, made.new_prompt_ids, completion, made.reply, made.sampling
    )
    tokenizer.reset()
    chat_answer({"logprobs": True}, [CompletedTurn(made, 1, 0.0)], tokenizer)
    assert tokenizer.decodes == len({*ids, 7})


def test_the_least_recently_used_entry_is_evicted() -> None:
    recent: LruCache[str, int] = LruCache(2)
    assert recent.put("a", 1) == 1 and recent.put("b", 2) == 2
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert [recent.get(key) for key in "abc"] == [1, None, 3]


def test_more_template_options_than_the_cache_holds_are_served(proxy: RunningProxy) -> None:
    """A server accepts any number of them; a renderer that was evicted from the cache is created again."""
    spellings = ["".join(letters) for letters in itertools.product("tT", "rR", "uU", "eE")]
    spellings += ["".join(letters) for letters in itertools.product("yY", "eE", "sS")]
    prompts = set()
    for spelling in [*spellings, spellings[0]]:
        options = {"enable_thinking": spelling}
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": options}
        assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200, spelling
        prompts.add(tuple(proxy.engine.calls[-1].input_ids.tolist()))
    assert len(prompts) == 1
