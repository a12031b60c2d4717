"""Every scenario can be solved, only a solution earns its reward, and a conversation is one recorded branch.

The starting model was trained on exactly the tokens that the agent sends and the proxy renders.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import desk_agent as desk_agent_module
import pytest
from clerk_examples import DeskTranscriber, conversations, reply_text
from clerks import CAREFUL, CARELESS, DONE, Clerk, Habits, tool_message
from customer import ASKS, INSISTS, ScriptedCustomer
from desk import SERVICES, Desk, amounts
from desk_agent import MAX_MODEL_CALLS, Ask, converse, desk_agent, desk_agent_with_model, reward
from integration_support import running_stack
from openai import DefaultAsyncHttpxClient
from recipe_runs import train as train_recipe
from scenarios import (
    SMALL,
    heldout_tasks,
    reference_world,
    scenario,
    small_heldout_tasks,
    small_train_tasks,
    train_tasks,
)
from scripted_runs import trained_step
from tokenizers import Tokenizer
from warmup.tokenizer import PHRASES, train_tokenizer
from warmup.transcripts import call_text

from areal_agents.config import load_config
from areal_agents.episode import Episode
from areal_agents.proxy import ProxyConfig
from areal_agents.store import Store
from areal_agents.testing import ScriptedCall
from integrations.conversations import in_order

EXAMPLE = Path(__file__).parents[2] / "examples" / "conversation"
MODEL = EXAMPLE / "model"


def played(task: dict[str, Any], ask: Ask) -> tuple[float, list[dict[str, Any]], ScriptedCustomer]:
    """The reward and the messages of a conversation with the scripted customer."""
    return asyncio.run(played_by(task, ask))


async def played_by(task: dict[str, Any], ask: Ask) -> tuple[float, list[dict[str, Any]], ScriptedCustomer]:
    desk = Desk(task["world"], task["services"])
    customer = ScriptedCustomer(task["customer"], desk)
    messages = await converse(desk, customer, ask)
    return reward(task, desk, customer, messages), messages, customer


def by_clerk(task: dict[str, Any], habits: Habits) -> float:
    return played(task, Clerk(task, habits, random.Random(0)))[0]


def saying(text: str) -> Ask:
    async def ask(messages: Sequence[Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    return ask


# --- Scenarios ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [heldout_tasks, small_heldout_tasks], ids=["whole", "small"])
def test_the_solution_of_every_held_out_scenario_earns_the_reward(tasks: Any) -> None:
    found = tasks()
    assert len(found) == 256 and found == tasks()
    assert {by_clerk(task, CAREFUL) for task in found} == {1.0}
    kinds = Counter(task["kind"] for task in found)
    assert min(kinds[kind] for kind in ("allowed", "forbidden", "two requests")) >= 35
    reasons = {
        a[2]["reason"] for task in found for request in task["actions"] for a in request if "reason" in a[2]
    }
    assert reasons == {r for name in found[0]["services"] for r in SERVICES[name].reasons}


def test_held_out_riders_are_never_seen_in_training() -> None:
    for train, heldout in ((train_tasks, heldout_tasks), (small_train_tasks, small_heldout_tasks)):
        tasks = train()
        seen = {rider for task in tasks for rider in task["world"]["riders"]}
        assert len(tasks) == 1000
        assert not seen & {rider for task in heldout() for rider in task["world"]["riders"]}


def test_wrong_outcomes_earn_no_reward() -> None:
    """The clerk ignores rules, declines allowed requests, gives a wrong reason, only claims to have acted, or
    leaves a lock open."""
    bad = {
        "obeys": Habits(obeys=1.0),
        "refuses": Habits(refuses=1.0),
        "wrong_reason": Habits(wrong_reason=1.0),
        "only_says": Habits(only_says=1.0),
    }
    for task in small_heldout_tasks():
        first = task["customer"]["goals"][0]
        is_forbidden = first["kind"] == "forbidden"
        for name, habits in bad.items():
            if (name in ("obeys", "wrong_reason")) == is_forbidden or name == "only_says":
                assert by_clerk(task, habits) == 0.0, (task["id"], name)
        if first["service"] == "end" and ["customer", "close_lock", {}] in task["actions"][0]:
            assert by_clerk(task, Habits(forgets_lock=1.0)) == 0.0
        if is_forbidden and first["insists"] and first["service"] == "refund":
            assert by_clerk(task, Habits(gives_in=1.0)) == 0.0


def test_the_careless_clerk_makes_every_mistake_and_earns_less_than_half() -> None:
    made: Counter[str] = Counter()
    earned = []
    for number, task in enumerate(small_heldout_tasks()):
        score, messages, _ = played(task, Clerk(task, CARELESS, random.Random(number)))
        earned.append(score)
        mistakes = mistakes_in(task, messages)
        made.update(mistakes)
        # A ride that cannot be ended may still be declined for that reason.
        assert not (mistakes - {"lock is open"} and score), (task["id"], mistakes)
    assert 0.15 < sum(earned) / len(earned) < 0.45
    assert min(made[mistake] for mistake in MISTAKES) >= 5, made


MISTAKES = ("forbidden refund", "wrong reason", "gives in", "refuses", "lock is open", "only says")


def mistakes_in(task: dict[str, Any], messages: Sequence[dict[str, Any]]) -> set[str]:
    """The mistakes of a conversation, read from its messages."""
    goals = task["customer"]["goals"]
    forbidden = {goal["of"] for goal in goals if goal["kind"] == "forbidden" and goal["service"] == "refund"}
    right = {a[2]["reason"] for request in task["actions"] for a in request if a[1] == "decline"}
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in messages
        for call in message.get("tool_calls", [])
    ]
    declined = [arguments["reason"] for name, arguments in calls if name == "decline"]
    refunded = [arguments["ride"] for name, arguments in calls if name == "refund"]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    found = set()
    if forbidden & {*refunded}:
        found.add("gives in" if right & {*declined} else "forbidden refund")
    if declined and not right:
        found.add("refuses")
    if right and {*declined} - right:
        found.add("wrong reason")
    if any("lock of" in message["content"] for message in messages if message["role"] == "tool"):
        found.add("lock is open")
    for done, tool in ((DONE["end"], "end_ride"), (DONE["refund"], "refund")):
        if done in said and tool not in [name for name, _ in calls]:
            found.add("only says")
    return found


def test_the_reward_requires_what_the_customer_must_hear() -> None:
    tasks = [task for task in heldout_tasks() if task["service"] == "fee" and task["kind"] == "allowed"]
    assert tasks
    for task in tasks:
        (fee,) = task["hears"]
        world = reference_world(task)
        everything = [row["fee"] for row in task["world"]["rides"].values()]

        async def shouting(messages: Sequence[Any], fees: list[int] = everything) -> dict[str, Any]:
            return {"role": "assistant", "content": " ".join(f"{cents / 100:.2f}" for cents in fees)}

        assert by_clerk(task, CAREFUL) == 1.0
        assert played(task, saying(f"It cost €{fee.split()[0]}."))[0] == 1.0  # other words, same amount
        assert played(task, shouting)[0] == 0.0  # the fees of other rides too
        assert played(task, saying("It cost 99.90 euros."))[0] == 0.0
        assert played(task, saying(f"It cost {fee}, or 99.90 euros."))[0] == 0.0  # two amounts are a guess
        assert played(task, whispering(task, fee))[0] == 0.0
        assert world == task["world"]
    assert amounts("€2,40, 12.5 km, 1.234.56, 7.00 euros") == {"2.40 euros", "7.00 euros"}


def whispering(task: dict[str, Any], fee: str) -> Any:
    """A desk that writes the fee next to a tool call, and tells the customer another amount."""
    call = {**tool_message("look_up", {"rider": task["customer"]["rider"]}, 0), "content": f"It is {fee}."}
    replies = iter([call, {"role": "assistant", "content": "It cost 0.00 euros."}])

    async def ask(messages: Sequence[Any]) -> dict[str, Any]:
        return next(replies)

    return ask


def test_a_customer_whose_request_for_a_fee_is_declined_must_hear_no_amount() -> None:
    tasks = [task for task in heldout_tasks() if task["service"] == "fee" and task["kind"] == "forbidden"]
    assert tasks
    for task in tasks:
        decline = tool_message("decline", {"rider": task["customer"]["rider"], "reason": "not_yours"}, 0)
        insisting = {"role": "assistant", "content": "I am sorry."}
        for said, wanted in (("It cost 99.90 euros.", 0.0), ("I cannot say.", 1.0)):
            replies = chain([decline, {"role": "assistant", "content": said}], repeat(insisting))

            async def ask(messages: Sequence[Any], replies: Any = replies) -> dict[str, Any]:
                return next(replies)

            assert played(task, ask)[0] == wanted, said


def test_declining_every_request_earns_little() -> None:
    """The agent asks for the rider number, and declines with one fixed reason without looking anything up."""

    def declining(task: dict[str, Any], reason: str) -> float:
        rider = task["customer"]["rider"]

        async def ask(messages: Sequence[Any]) -> dict[str, Any]:
            if not any(rider in m["content"] for m in messages if m["role"] == "user"):
                return {"role": "assistant", "content": "What is your rider number?"}
            if messages[-1]["role"] == "user":
                return tool_message("decline", {"rider": rider, "reason": reason}, len(messages))
            return {"role": "assistant", "content": "That is not possible."}

        return played(task, ask)[0]

    for tasks, most in ((heldout_tasks()[:100], 0.1), (small_heldout_tasks()[:100], 0.2)):
        reasons = {reason for name in tasks[0]["services"] for reason in SERVICES[name].reasons}
        earned = [sum(declining(task, reason) for task in tasks) / len(tasks) for reason in sorted(reasons)]
        assert 0.0 < max(earned) <= most


# --- The desk and the customer --------------------------------------------------------------------------


def test_invalid_tool_calls_change_nothing_and_return_the_reason() -> None:
    task = next(t for t in heldout_tasks() if t["service"] == "end" and t["kind"] == "forbidden")
    desk = Desk(task["world"])
    ride, rider = task["customer"]["goals"][0]["of"], task["customer"]["rider"]
    bike = task["world"]["rides"][ride]["bike"]
    for name, arguments, said in (
        ("end_ride", {"ride": ride}, f"Error: the lock of {bike} is open."),
        ("end_ride", {"ride": "T1"}, "Error: T1 is no running ride."),
        ("end_ride", {"ride": 7}, "Error: ride must be a string."),
        ("end_ride", {}, "Error: end_ride takes ride."),
        ("end_ride", [ride], "Error: end_ride takes ride."),
        ("refund", {"ride": ride}, f"Error: {ride} is no ride that has ended."),
        ("unlock", {"rider": rider, "bike": bike}, f"Error: {bike} is no locked bike."),
        ("offer_plan", {"rider": rider, "plan": "gold"}, "Error: plan must be one of basic, plus."),
        ("offer_plan", {"rider": rider, "plan": "basic"}, f"Error: {rider} has the plan basic."),
        ("decline", {"rider": "R1", "reason": "in_debt"}, "Error: there is no rider R1."),
        ("receipt", {"rider": rider, "ride": "T1"}, f"Error: {rider} has no ride T1."),
        ("close_lock", {"rider": rider}, "Error: there is no tool close_lock."),  # a tool of the customer
    ):
        assert desk.call(name, json.dumps(arguments)) == said
    assert desk.call("end_ride", '{"ride": ') == "Error: the arguments are not JSON."
    assert desk.world == task["world"]


def test_the_customer_performs_its_own_actions_only_if_it_is_asked() -> None:
    task = next(t for t in small_heldout_tasks() if ["customer", "close_lock", {}] in t["actions"][0])
    desk = Desk(task["world"], task["services"])
    customer = ScriptedCustomer(task["customer"], desk)
    bike = desk.world["bikes"][task["world"]["rides"][task["customer"]["goals"][0]["of"]]["bike"]]
    assert task["customer"]["rider"] in (asyncio.run(customer.reply("Your number?")) or customer.opening())
    assert bike["lock"] == "open"
    assert "lock" in (asyncio.run(customer.reply("Could you push the lever at the back, please?")) or "")
    assert bike["lock"] == "closed"


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("Happy to help! Could you give me your rider number, please?", {"rider"}),
        ("May I have your ID, and the number of the ride?", {"rider", "ride"}),
        ("Which ride would you like refunded? Please share the ride ID.", {"ride"}),
        ("What is the number on the bike?", {"bike"}),
        ("Please lock the bike first, then I can end it.", {"close_lock"}),
        ("I can't end it while the lock is open. Could you push the lever until it clicks?", {"close_lock"}),
        ("Please close the app, and open it again.", {"close_lock", "restart_app"}),
        ("Try restarting your phone's app.", {"restart_app"}),
        ("I've sent you the offer. Please confirm it in the app.", {"accept_offer"}),
        ("I'm sorry, but a refund isn't possible here.", set()),
        ("Your ride has ended.", set()),
    ],
)
def test_the_customer_understands_wordings_that_the_clerks_do_not_use(said: str, asked: set[str]) -> None:
    assert {name for name, pattern in ASKS.items() if re.search(pattern, said, re.IGNORECASE)} == asked


def test_a_refused_customer_insists_as_often_as_configured_and_ends_the_conversation() -> None:
    for task in heldout_tasks():
        (goal, *others) = task["customer"]["goals"]
        if goal["kind"] == "forbidden" and not others:
            _, messages, customer = played(task, Clerk(task, CAREFUL, random.Random(0)))
            assert sum(m["content"] in INSISTS for m in messages) == goal["insists"]
            assert customer.is_done


def test_every_conversation_ends() -> None:
    """Whether the desk repeats a phrase or speaks at random, the customer hangs up before the call limit."""
    phrases = [
        "", "Hello.", "What is your rider number?", "Which ride is it?", "I cannot do that.",
        "Please close the lock, restart the app, and accept the offer.", "Shall I end it?",
        "Which bike is it? And which plan? It costs 9.00 euros.",
    ]  # fmt: skip
    for number, task in enumerate(heldout_tasks()):
        rng = random.Random(number)

        async def anything(messages: Sequence[Any], rng: random.Random = rng) -> dict[str, Any]:
            return {"role": "assistant", "content": rng.choice(phrases)}

        for ask in (anything, saying(phrases[number % len(phrases)])):
            messages = played(task, ask)[1]
            assert sum(m["role"] == "assistant" for m in messages) < MAX_MODEL_CALLS

    async def busy(messages: Sequence[Any]) -> dict[str, Any]:
        return tool_message("look_up", {"rider": "R100"}, len(messages))

    score, messages, customer = played(task, busy)
    assert score == 0.0 and not customer.is_done and len(messages) < 20


# --- Through the proxy ----------------------------------------------------------------------------------


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def two_sided() -> tuple[dict[str, Any], list[str], list[str]]:
    """A scenario in which the customer must close a lock, and the replies of both models."""
    tasks = (scenario(f"test/{n}", ("end",), held_out=False) for n in range(1000))
    task = next(t for t in tasks if ["customer", "close_lock", {}] in t["actions"][0])
    rider, ride = task["customer"]["rider"], task["customer"]["goals"][0]["of"]
    think = "<think>\nHm.\n</think>\n\n"
    desk = [
        f"{think}What is your rider number?",
        think + called("look_up", rider=rider),
        f"{think}Please close the lock.",
        think + called("end_ride", ride=ride),
        f"{think}Your ride has ended.",
    ]
    customer = [f"I am {rider}.", called("close_lock"), "It is closed now, sir.", called("hang_up")]
    return task, desk, customer


class Played(NamedTuple):
    """The results of an episode with a model as the customer."""

    score: float
    turns: list[dict[str, Any]]
    episodes: list[str]  # in the policy's store


async def played_by_models(folder: Path, reasoning: str) -> Played:
    """Play the scenario with policy and customer behind real proxies, each on a scripted engine."""
    task, desk, customer = two_sided()
    with running_stack(MODEL, folder / "customer.db") as other:
        other.engine.script = in_order(customer)
        upstream = {"base_url": f"{other.url}/v1", "key": "none", "model": "any"}
        config = ProxyConfig.model_validate({"reasoning": reasoning, "models": {"customer": upstream}})
        with running_stack(MODEL, folder / "policy.db", config) as stack:
            opened = stack.open_episode(desk)
            ep = Episode(opened["id"], opened["base_url"], opened["key"])
            score = await desk_agent_with_model(task, ep)
            episodes = [row["id"] for row in stack.http.get("/episodes").json()["episodes"]]
            return Played(score, stack.turns(opened), episodes)


@pytest.fixture(scope="module")
def by_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """The same episode under both settings of `proxy.reasoning`."""

    async def play_both() -> dict[str, Played]:  # in one event loop, as in a run: the agent keeps its client
        folder = tmp_path_factory.mktemp("models")
        found = {}
        for reasoning in ("keep", "template"):
            (folder / reasoning).mkdir()
            found[reasoning] = await played_by_models(folder / reasoning, reasoning)
        return found

    return asyncio.run(play_both())


def test_a_model_as_customer_acts_and_is_never_trained(by_models: dict[str, Played]) -> None:
    """The policy's store has only the policy's turns, whose prompts contain the customer's messages."""
    found = by_models["keep"]
    assert found.score == 1.0
    assert len(found.episodes) == 1 and len(found.turns) == 5
    prompt = text_of(found.turns[-1]["prompt_ids"])
    assert "It is closed now, sir." in prompt  # read by the policy
    assert not any("sir" in text_of(turn["token_ids"]) for turn in found.turns)
    assert "close_lock" not in prompt  # the tool calls of the customer are hidden


def test_a_conversation_is_one_branch_if_reasoning_is_kept(by_models: dict[str, Played]) -> None:
    """Each prompt continues the tokens before it; with `template`, a customer's message begins a new root."""
    roots = {name: sum(turn["parent"] is None for turn in found.turns) for name, found in by_models.items()}
    assert roots == {"keep": 1, "template": 3}
    for before, after in pairwise(by_models["keep"].turns):
        known = before["prompt_ids"] + before["token_ids"]
        assert after["prompt_ids"][: len(known)] == known


def text_of(ids: Sequence[int]) -> str:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ids)


# --- The starting model -------------------------------------------------------------------------------


async def test_conversations_are_played_as_they_are_demonstrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy document, the tools, and the messages of customer and tools have the same tokens."""
    # The agent keeps its client for all episodes of an event loop, and each test has its own loop.
    monkeypatch.setattr(desk_agent_module, "HTTP", DefaultAsyncHttpxClient(timeout=600))
    shown = DeskTranscriber(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    played_clerks = [(habits, number) for habits in (CAREFUL, CARELESS) for number in range(3)]
    with running_stack(MODEL, tmp_path / "store.db", ProxyConfig(reasoning="keep")) as stack:
        for habits, number in played_clerks:
            task = scenario(f"shown/{number}", SMALL, held_out=True)
            score, messages, _ = await played_by(task, Clerk(task, habits, random.Random(number)))
            replies = [reply_text(message) for message in messages if message["role"] == "assistant"]
            opened = stack.open_episode(replies)
            assert await desk_agent(task, Episode(opened["id"], opened["base_url"], opened["key"])) == score
            turns = stack.turns(opened)
            assert [turn["forked_from"] for turn in turns] == [None] * len(replies)
            expected = shown.transcribe(messages)
            assert (*turns[-1]["prompt_ids"], *turns[-1]["token_ids"]) == expected.ids
            assert [end - start for start, end in expected.replies] == [
                len(turn["token_ids"]) for turn in turns
            ]


def test_the_shipped_tokenizer_equals_the_generated_one_and_splits_numbers_into_digits() -> None:
    spec = importlib.util.spec_from_file_location("make_desk_model", EXAMPLE / "make_model.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    texts = maker.tokenizer_texts(random.Random(0))
    made = train_tokenizer(texts, pieces=PHRASES)
    shipped = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert made.to_str() == shipped.to_str()
    in_call = shipped.encode(call_text("refund", {"ride": "T408"})).tokens
    assert in_call[in_call.index("4") :][:3] == shipped.encode("It is ride T408.").tokens[-4:-1]
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4_000_000


def test_replies_fit_into_the_limit_of_the_laptop_configuration() -> None:
    limit = load_config(EXAMPLE / "config.yaml").proxy.default_max_tokens
    shown = DeskTranscriber(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    for messages in conversations(CARELESS, random.Random(0), 100):
        example = shown.transcribe(messages)
        assert max(end - start for start, end in example.replies) <= limit
        assert len(example.ids) < 1500


def test_the_recipe_trains(tmp_path: Path) -> None:
    run = train_recipe(EXAMPLE / "config.yaml", tmp_path / "run", "trainer.steps=2")
    assert [row["version"] for row in run.metrics] == [1, 2]
    assert any(row["tokens"] for row in run.metrics)
    assert run.summary["heldout_after"] is not None


# --- Configurations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.24gb.yaml", "config.node.yaml"])
def test_the_configurations_for_gpus_are_valid_apart_from_the_model(name: str) -> None:
    config = load_config(EXAMPLE / name, [f"model={MODEL}", f"engine.python={sys.executable}"])
    assert config.proxy.reasoning == "keep"
    assert (config.proxy.models != {}) == (str(config.agent).endswith("desk_agent_with_model"))


def test_a_step_of_the_laptop_configuration_trains_whole_conversations(tmp_path: Path) -> None:
    """Two of four episodes solve the scenario; each is one branch, and its tokens are trained."""
    task, replies, _ = two_sided()
    given_up = called("decline", rider=task["customer"]["rider"], reason="lock_open")
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([task]))

    def script(call: ScriptedCall) -> str:
        turn = call.prompt_text.count("<|im_start|>assistant") - 1
        if turn == 0:
            return "Hello. What is your rider number?" if call.index % 2 else replies[0]
        if "Hello." not in call.prompt_text:
            return replies[turn]
        return given_up if turn == 1 else "That is not possible."

    settings = [f"data.path={tasks}", "rollout.group_size=4", "rollout.concurrency=1"]
    row = trained_step(EXAMPLE / "config.yaml", MODEL, script, tmp_path / "run", settings)
    assert row["reward_mean"] == 0.5 and row["tokens"] > 0 and row["grad_norm"] > 0
    with Store.open(tmp_path / "run" / "store.db") as store:
        ended = [episode.id for episode in store.episodes(split="train") if episode.status == "finished"]
        episodes = store.load_episodes(ended)
    insists = task["customer"]["goals"][0]["insists"]
    assert sorted(len(episode.turns) for episode in episodes) == sorted([5, 3 + insists] * 2)
    for episode in episodes:
        assert [turn.forked_from for turn in episode.turns] == [None] * len(episode.turns)
        assert sum(turn.parent is None for turn in episode.turns) == 1
