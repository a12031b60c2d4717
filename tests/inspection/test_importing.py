"""Imports of conversations: their exact tokens, faulty files that are refused, and training on imports."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from inspection_support import MODEL, SEARCH, Recorded, running_proxy, tool_call
from scripted_sampler import ScriptedSampler
from typer.testing import CliRunner

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.cli import app
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Rollout, RolloutGroup
from areal_agents.errors import ArealAgentsError, ConfigError, DataError, TrainingError
from areal_agents.inspection.formats.training_trace import trace
from areal_agents.inspection.sources import opened
from areal_agents.rendering import ChatRenderer, Tokenizer
from areal_agents.store import Store
from areal_agents.training.batches.recorded import RecordedGroups

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from docs_support import bash, block  # noqa: E402

NOT_THINKING = {"enable_thinking": False}
TOKENIZER = Tokenizer.from_folder(MODEL)
SFT = AlgorithmConfig.model_validate("sft")
ASK = {"role": "user", "content": "Where is Lyon?"}
SAY = {"role": "assistant", "content": "In France"}
CALL = {"id": "call_7", "type": "function", "function": {"name": "search", "arguments": '{"query": "Lyon"}'}}
LOOK = {"role": "assistant", "content": None, "tool_calls": [CALL]}
BROKEN = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "search", "arguments": "{"}}]}
FOUND = {"role": "tool", "tool_call_id": "call_7", "content": "In France"}


def line(*messages: dict[str, Any], **more: Any) -> str:
    return json.dumps({"messages": messages, **more})


def imported(folder: Path, lines: Sequence[str] | Path, *more: str, into: str = "store.db") -> Path:
    """Import lines, or a file or folder, and return the store."""
    source = folder / "given.jsonl" if not isinstance(lines, Path) else lines
    if not isinstance(lines, Path):
        source.write_text("\n".join(lines) + "\n")
    given = ["episodes", "import", str(source), "--into", str(folder / into), "--model", str(MODEL), *more]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder / into


def episodes_in(path: Path) -> list[RecordedEpisode]:
    with Store.open(path) as store:
        return store.load_episodes([found.id for found in store.episodes()])


def training_data(episode: RecordedEpisode, algorithm: AlgorithmConfig = SFT) -> TrainingData:
    group = RolloutGroup("g", episode.task, (Rollout(episode.task, 0, episode, None),))
    return build_training_data([group], algorithm)


def trained_tokens(episode: RecordedEpisode) -> list[tuple[list[int], list[bool]]]:
    """The ids and the loss mask of each sample."""
    return [(s.token_ids.tolist(), s.loss_mask.tolist()) for s in training_data(episode).samples]


def learned(sample: tuple[list[int], list[bool]]) -> str:
    """The text of the tokens of a sample that are trained."""
    return TOKENIZER.decode([token for token, is_trained in zip(*sample, strict=True) if is_trained])


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one episode of the proxy: a call, its result, and two branches with a question each."""
    path = tmp_path_factory.mktemp("talk") / "recorded.db"
    replies = iter(
        ["I look.\n" + tool_call(query="Lyon, where?"), "In France,\nin the east.", "Paris", "Rome"]
    )
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL, options=NOT_THINKING))
    engine.script = lambda call: next(replies)
    with running_proxy(path, engine) as proxy:
        episode = proxy.open_episode(task={"id": "t", "input": {}})
        client = proxy.openai(episode)

        def ask(messages: list[Any]) -> list[Any]:
            reply = client.chat.completions.create(model="p", messages=messages, tools=[SEARCH]).choices[0]
            return [*messages, reply.message.model_dump(exclude_none=True)]

        called = ask([{"role": "system", "content": "You are brief."}, ASK])
        call_id = called[-1]["tool_calls"][0]["id"]
        answered = ask([*called, {"role": "tool", "tool_call_id": call_id, "content": "In France"}])
        for question in ("And its capital?", "And that of Italy?"):
            ask([*answered, {"role": "user", "content": question}])
        proxy.http.post(f"/episodes/{episode['id']}/reward", json={"reward": 1})
        proxy.http.post(f"/episodes/{episode['id']}/finish", json={})
    return path


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one episode of the proxy with its default settings: a call and the answer."""
    path = tmp_path_factory.mktemp("searched") / "store.db"
    replies = iter(["I look.\n" + tool_call(query="Lyon"), "In France"])
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    engine.script = lambda call: next(replies)
    with running_proxy(path, engine) as proxy:
        episode = proxy.open_episode(task={"id": "t", "input": {}})
        ask = proxy.openai(episode).chat.completions.create
        messages: list[Any] = [ASK]
        called = ask(model="p", messages=messages, tools=[SEARCH]).choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "In France"}
        ask(model="p", messages=[*messages, called.model_dump(exclude_none=True), result], tools=[SEARCH])
        proxy.http.post(f"/episodes/{episode['id']}/reward", json={"reward": 1})
        proxy.http.post(f"/episodes/{episode['id']}/finish", json={})
    return path


def test_an_exported_conversation_is_imported_with_its_tokens_by_default(
    searched: Path, tmp_path: Path
) -> None:
    """The template of this model has no reasoning, so no empty block of reasoning is learned."""
    (recorded,) = episodes_in(searched)
    out = tmp_path / "m.jsonl"
    export = ["episodes", "export", str(searched), str(out), "--format", "messages"]
    assert CliRunner().invoke(app, export, catch_exceptions=False).exit_code == 0
    (tmp_path / "tools.json").write_text(json.dumps([SEARCH]))
    (again,) = episodes_in(imported(tmp_path, out, "--tools", str(tmp_path / "tools.json")))
    assert trained_tokens(again) == trained_tokens(recorded)
    assert learned(trained_tokens(again)[0]).endswith("In France<|im_end|>")


def exported_and_imported(talk: Path, folder: Path, form: str, name: str) -> list[RecordedEpisode]:
    export = ["episodes", "export", str(talk), str(folder / name), "--format", form]
    assert CliRunner().invoke(app, export, catch_exceptions=False).exit_code == 0
    (folder / "tools.json").write_text(json.dumps([SEARCH]))
    (folder / "c.yaml").write_text(json.dumps({"proxy": {"template_options": NOT_THINKING}}))
    more = ("--tools", str(folder / "tools.json"), "--config", str(folder / "c.yaml"))
    return episodes_in(imported(folder, folder / name, *more))


def test_an_exported_conversation_is_imported_with_its_recorded_loss_mask(talk: Path, tmp_path: Path) -> None:
    """Each of the two branches is a conversation. Their shared part is recorded, and trained, once."""
    first, second = trained_tokens(episodes_in(talk)[0])
    shared = next(n for n, (a, b) in enumerate(zip(first[0], second[0], strict=False)) if a != b)
    owner, other = (first, second) if sum(first[1][:shared]) else (second, first)
    assert sum(owner[1][:shared]) and not sum(other[1][:shared])
    found = exported_and_imported(talk, tmp_path, "messages", "m.jsonl")
    # A file of messages does not show that two conversations share replies, so both are trained on them.
    whole = (other[0], owner[1][:shared] + other[1][shared:])
    assert sorted(sample for one in found for sample in trained_tokens(one)) == sorted([owner, whole])


def test_the_shared_part_of_exported_trajectories_is_trained_once(talk: Path, tmp_path: Path) -> None:
    recorded = trained_tokens(episodes_in(talk)[0])
    found = exported_and_imported(talk, tmp_path, "atif", "atif")
    again = [sample for one in found for sample in trained_tokens(one)]
    assert sorted(ids for ids, _ in again) == sorted(ids for ids, _ in recorded)
    assert sum(sum(mask) for _, mask in again) == sum(sum(mask) for _, mask in recorded)
    assert [[turn.discarded for turn in one.turns] for one in found] == [
        ["", "", ""], ["copied context", "copied context", ""],
    ]  # fmt: skip


def test_an_exported_row_has_all_branches_and_its_score(talk: Path, tmp_path: Path) -> None:
    """The shared part of the branches is trained once, and rows are selected by their score."""
    recorded = trained_tokens(episodes_in(talk)[0])
    (again,) = exported_and_imported(talk, tmp_path, "jsonl", "e.jsonl")
    assert sorted(trained_tokens(again)) == sorted(recorded)
    assert again.score == 1 and len(again.turns) == 4
    row = json.loads((tmp_path / "e.jsonl").read_text())
    other = {**row, "id": "episode-2", "score": 0.25}
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    more = ["--tools", str(tmp_path / "tools.json"), "--config", str(tmp_path / "c.yaml")]
    chosen = imported(tmp_path, tmp_path / "two.jsonl", *more, "--min-reward", "0.5", into="some.db")
    assert [episode.score for episode in episodes_in(chosen)] == [1.0]
    every = imported(tmp_path, tmp_path / "two.jsonl", *more, into="all.db")
    assert [episode.score for episode in episodes_in(every)] == [1.0, 0.25]
    with pytest.raises(DataError, match="no episode of the files has a score of at least 2"):
        imported(tmp_path, tmp_path / "two.jsonl", *more, "--min-reward", "2", into="none.db")
    with pytest.raises(DataError, match="1 of these episodes have been imported into .* before"):
        imported(tmp_path, tmp_path / "e.jsonl", *more, into="some.db")


def test_recorded_tokens_are_kept_if_they_are_those_of_the_model(talk: Path, tmp_path: Path) -> None:
    """The policy sampled the reply in other tokens than its template would write."""
    renderer = ChatRenderer.from_folder(MODEL)
    prompt = renderer.render([Message("user", "Where is Lyon?")])
    sampled = [*(i for c in "Lyon" for i in renderer.tokenizer.encode(c)), renderer.stop_token_ids[0]]
    for ids, expected in ((prompt.tolist(), sampled), ([1, 2], None)):
        metrics = {"prompt_token_ids": ids, "completion_token_ids": sampled}
        steps = [ATIF["steps"][1], {"source": "agent", "message": "Lyon", "metrics": metrics}]
        file = tmp_path / "t.json"
        file.write_text(json.dumps({**ATIF, "agent": {}, "steps": steps}))
        (episode,) = episodes_in(imported(tmp_path, file, into=f"{len(ids)}.db"))
        found = episode.turns[0].completion.token_ids.tolist()
        assert (found == sampled) == (expected is not None)
        assert renderer.tokenizer.decode(found) == "Lyon<|im_end|>"


def test_imported_turns_are_marked_as_not_sampled_by_a_policy(tmp_path: Path) -> None:
    path = imported(tmp_path, [line(ASK, SAY)], "--reward", "0.5")
    (episode,) = episodes_in(path)
    (turn,) = episode.turns
    assert turn.completion.logprobs is None and turn.completion.is_imported
    assert set(turn.completion.versions.tolist()) == {-1}
    assert (episode.status, episode.score) == ("finished", 0.5)
    with opened(str(path)) as source:
        shown = source.get(episode.id)
        assert shown["turns"][0]["imported"] and shown["turns"][0]["logprobs"] is None
        assert shown["turns"][0]["versions"] is None
        assert shown["metadata"]["from"].endswith("given.jsonl:1")
        with pytest.raises(ConfigError, match="was imported and has no logprobs"):
            trace(shown)
    (sample,) = training_data(episode).samples
    assert np.isnan(sample.behavior_logprobs[sample.loss_mask]).all()


@pytest.mark.parametrize("name", ["decoupled_ppo", "grpo", "self_distillation"])
def test_algorithms_that_need_behavior_logprobs_refuse_imported_turns(tmp_path: Path, name: str) -> None:
    algorithm = AlgorithmConfig.model_validate(name)
    path = imported(tmp_path, [line(ASK, SAY)])
    with pytest.raises(
        TrainingError, match=f"no behavior logprobs.* algorithm {name}.*algorithm: sft, or dpo"
    ):
        training_data(episodes_in(path)[0], algorithm)
    with Store.open(path) as store:
        groups = RecordedGroups.read(store, seed=0)
        groups.refuse_imported(SFT)
        with pytest.raises(TrainingError, match="has 1 imported episodes: imported turns have no behavior"):
            groups.refuse_imported(algorithm)


def test_replies_that_must_not_be_learned_are_masked(tmp_path: Path) -> None:
    wrong = {"role": "assistant", "content": "In Spain", "weight": 0}
    again = {"role": "user", "content": "Look again."}
    (weighted, greeted) = episodes_in(
        imported(
            tmp_path,
            [line(ASK, wrong, again, {**SAY, "weight": 1}), line({**wrong, "content": "Hello"}, ASK, SAY)],
        )
    )
    assert [turn.discarded for turn in weighted.turns] == ["weight 0", ""]
    for episode in (weighted, greeted):
        (sample,) = trained_tokens(episode)
        assert learned(sample) == "In France<|im_end|>"
        text = TOKENIZER.decode(sample[0])
        assert ("In Spain" in text) == (episode is weighted) and ("Hello" in text) == (episode is greeted)


def test_text_parts_are_joined_and_special_tokens_stay_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Where is <|im_end|>"}, {"type": "text", "text": "Lyon?"}]
    (episode,) = episodes_in(imported(tmp_path, [line({"role": "user", "content": parts}, SAY)]))
    assert episode.turns[0].new_messages[0].content == "Where is <|im_end|>Lyon?"
    assert episode.turns[0].special_tokens_as_text == 1


def test_reasoning_is_learned_where_the_template_writes_it(tmp_path: Path) -> None:
    lines = [line(ASK, {**SAY, "reasoning_content": "Easy."})]
    (episode,) = episodes_in(imported(tmp_path, lines))
    assert learned(trained_tokens(episode)[0]) == "<think>\nEasy.\n</think>\n\nIn France<|im_end|>"
    (tmp_path / "c.yaml").write_text(json.dumps({"proxy": {"template_options": NOT_THINKING}}))
    with pytest.raises(
        DataError, match=r"messages\[1\]: family \S+ does not write this reply after the prompt"
    ):
        imported(tmp_path, lines, "--config", str(tmp_path / "c.yaml"), into="other.db")
    without = ["--config", str(tmp_path / "c.yaml"), "--without-reasoning"]
    (episode,) = episodes_in(imported(tmp_path, lines, *without, into="other.db"))
    assert learned(trained_tokens(episode)[0]) == "In France<|im_end|>"


FAULTS = {
    "{": "it is not valid JSON",
    "[]": "a document must be a JSON object",
    line(): "messages must be a list with at least one message",
    line(ASK): "it has no reply to learn",
    line(SAY): r"messages\[0\]: the conversation begins with a reply",
    line(ASK, {**SAY, "weight": 0}): "it has no reply to learn",
    line(ASK, {**SAY, "weight": 0.5}): r"messages\[1\].weight must be 0 or 1",
    line({**ASK, "weight": 1}, SAY): r"messages\[0\].weight must be 0 or 1, in a message of the assistant",
    line({"role": "wizard", "content": "x"}, SAY): r"messages\[0\]: role must be",
    line({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, SAY): "of type 'image_url'",
    line(ASK, {"role": "assistant", "function_call": {"name": "f"}}): "function_call is not supported",
    line(ASK, {**SAY, "refusal": "No."}): "refusal is not supported",
    line(ASK, SAY, functions=[{"name": "f"}]): "functions is not supported; use tools",
    json.dumps({"input": {}, "preferred_output": []}): "preferred_output: a preference",
    line(ASK, LOOK, FOUND, SAY): r"messages\[1\]: it calls a tool, but the document has no tools",
    line(ASK, FOUND, SAY, tools=[SEARCH]): "no message before it has this call",
    line(ASK, BROKEN, tools=[SEARCH]): r"messages\[1\]: .*cannot express this (reply|conversation)",
}  # fmt: skip


def test_a_faulty_line_is_named_and_nothing_is_imported(tmp_path: Path) -> None:
    good = line(ASK, SAY)
    for text, expected in FAULTS.items():
        with pytest.raises(DataError, match=r"given\.jsonl:3: .*" + expected) as caught:
            imported(tmp_path, [good, "", text, good])
        assert len(str(caught.value).splitlines()) == 2, "one line for the one fault"
    with pytest.raises(DataError, match="nothing was imported:") as caught:
        imported(tmp_path, ["{"] * 12)
    assert str(caught.value).splitlines()[-1] == "and 2 more"
    assert not (tmp_path / "store.db").exists()


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    path = imported(tmp_path, [line(ASK, SAY)])
    with pytest.raises(DataError) as caught:
        imported(tmp_path, [line(ASK, SAY)])
    assert str(caught.value).startswith(
        f"{tmp_path / 'given.jsonl'} has been imported into {path} before (1 episodes)"
    )
    imported(tmp_path, [line(ASK, {**SAY, "content": "There"})])
    assert len(episodes_in(path)) == 2


def test_held_out_episodes_of_an_export_are_not_trained_on_silently(
    recorded: Recorded, tmp_path: Path
) -> None:
    """ATIF names the split; a file of messages cannot, so held-out rows are written on request only."""

    def run(*given: str) -> Result:
        return CliRunner().invoke(app, ["episodes", *given], catch_exceptions=False)

    store, folder = str(recorded.store), str(tmp_path / "atif")
    found = run("export", store, folder, "--format", "atif")
    assert "1 of these 4 trajectories are of held-out tasks" in found.stderr
    (tmp_path / "tools.json").write_text(json.dumps([SEARCH]))
    given = ["--model", str(MODEL), "--tools", str(tmp_path / "tools.json")]
    found = run("import", folder, "--into", str(tmp_path / "a.db"), *given)
    assert "imported 3 conversations" in found.stdout
    assert "left out 1 conversations of held-out tasks" in found.stderr
    found = run("import", folder, "--into", str(tmp_path / "b.db"), "--held-out", *given)
    assert "imported 4 conversations" in found.stdout and not found.stderr
    (evaluated,) = (tmp_path / "atif").glob(f"{recorded.evaluated}*")
    with pytest.raises(DataError, match="all 1 conversations are of held-out tasks"):
        run("import", str(evaluated), "--into", str(tmp_path / "c.db"), *given)
    rows = [str(tmp_path / "m.jsonl"), "--format", "messages"]
    found = run("export", store, *rows)
    assert "wrote 3 conversations" in found.stdout and not found.stderr
    assert "wrote 4 conversations" in run("export", store, *rows, "--split", "all").stdout


def test_an_export_in_a_format_that_cannot_be_imported_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    for form, name, what in (
        ("sft", "sft", "a data set, as export --format sft and pairs write it"),
        ("parquet", "e.parquet", "Parquet, as export --format parquet writes it"),
        ("openenv", "t.jsonl", "a trace, as export --format openenv writes it"),
    ):
        export = ["episodes", "export", str(recorded.store), str(tmp_path / name), "--format", form]
        assert CliRunner().invoke(app, export, catch_exceptions=False).exit_code == 0
        with pytest.raises(DataError, match=f"{what}, which cannot be imported; .*messages or --format atif"):
            imported(tmp_path, tmp_path / name)


ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.7",
    "agent": {"name": "a", "version": "1", "tool_definitions": [SEARCH]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "You are brief."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Where is Lyon?"}]},
        {"step_id": 3, "source": "agent", "message": "", "llm_call_count": 1,
         "tool_calls": [{"tool_call_id": "c", "function_name": "search", "arguments": {"query": "Lyon"}}],
         "observation": {"results": [{"source_call_id": "c", "content": "In France"}]}},
        {"step_id": 4, "source": "agent", "message": "In France", "llm_call_count": 0,
         "observation": {"results": [{"content": "Go on."}]}},
        {"step_id": 5, "source": "agent", "message": "Done"},
    ],
}  # fmt: skip


def test_atif_trajectories_of_other_agents_are_imported(tmp_path: Path) -> None:
    """It has tools, results with and without a call, a step without a model, and an embedded sub-agent."""
    sub = {"trajectory_id": "s", **ATIF, "steps": [{**ATIF["steps"][1], "step_id": 1}, ATIF["steps"][4]]}
    file = tmp_path / "t.json"
    file.write_text(json.dumps({**ATIF, "subagent_trajectories": [sub]}))
    main, helper = episodes_in(imported(tmp_path, file))
    assert [turn.discarded for turn in main.turns] == ["", "no reply of a model", ""]
    assert [turn.new_messages[-1].role for turn in main.turns] == ["user", "tool", "user"]
    assert [len(main.forest.history(turn.id)) for turn in main.turns] == [2, 4, 6]
    text = "".join(learned(sample) for sample in trained_tokens(main))
    assert '"query": "Lyon"' in text and "Done<|im_end|>" in text and "France" not in text
    assert len(helper.turns) == 1 and helper.turns[0].tools_id == main.turns[0].tools_id != ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"schema_version": "2"}, "schema_version must be ATIF-v1.x, got '2'"),
        ({"steps": [{"source": "robot", "message": ""}]}, "step 1: source must be system, user or agent"),
        ({"steps": [ATIF["steps"][1], {**ATIF["steps"][4], "llm_call_count": 2}]}, "step 2: it stands for 2"),
        ({"steps": [{"source": "user", "message": [{"type": "image", "source": {}}]}, ATIF["steps"][4]]},
         "step 1: this model accepts only text, got a part of type 'image'"),
        ({"steps": [{**ATIF["steps"][1], "observation": []}, {**ATIF["steps"][4], "observation": [1]}]},
         "step 2: observation must be a JSON object"),
    ],
)  # fmt: skip
def test_a_fault_in_atif_is_reported_with_its_step(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({**ATIF, **change}))
    with pytest.raises(DataError, match=r"t\.json: " + expected):
        imported(tmp_path, file)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x.txt", "--into", "s.db", "--model", str(MODEL)], "ends in neither .jsonl nor .json"),
        (["x.jsonl", "--into", "s.db"], "give the model that is to be trained with --model"),
        (["x.jsonl", "--into", "no/s.db", "--model", str(MODEL)], "there is no folder no"),
        (["x.jsonl", "--into", "http://x", "--model", str(MODEL)], "is a proxy; give a store file"),
        (["x.jsonl", "--into", "s.db", "--model", str(MODEL)], "x.jsonl cannot be read"),
        (["x.jsonl", "--into", "s.db", "--model", str(MODEL), "--tools", "none"], "--tools: none cannot be"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArealAgentsError, match=expected):
        CliRunner().invoke(app, ["episodes", "import", *arguments], catch_exceptions=False)
    assert not (tmp_path / "s.db").exists()


def test_an_import_does_not_change_the_episodes_of_a_run(recorded: Recorded, tmp_path: Path) -> None:
    """The store of a running proxy gets the new episodes, and keeps its own."""
    before = len(recorded.proxy.http.get("/episodes").json()["episodes"])
    (tmp_path / "store").symlink_to(recorded.store.parent)
    imported(tmp_path, [line(ASK, SAY)], into=f"store/{recorded.store.name}")
    listed = recorded.proxy.http.get("/episodes").json()["episodes"]
    assert len(listed) == before + 1
    shown = recorded.proxy.http.get(f"/episodes/{listed[-1]['id']}", params={"tokens": 1}).json()
    assert shown["turns"][0]["logprobs"] is None and shown["turns"][0]["token_ids"]


def test_the_documented_commands_train_on_the_episodes_of_a_run(searched: Path, tmp_path: Path) -> None:
    """The commands of docs/inspecting.md train an agent that calls tools on its own episodes."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my_agent-seed0").symlink_to(searched.parent)
    (tmp_path / "tools.json").write_text(block("docs/inspecting.md", '[{"type"').text)
    config = block("docs/training.md", "# sft.yaml").text.replace("path/to/model", "quickstart")
    config = config.replace("groups: 16", "groups: 1").replace("steps: 20", "steps: 1")
    (tmp_path / "sft.yaml").write_text(config)
    script = "areal-agents episodes export runs/my_agent-seed0 good.jsonl --format"
    bash(block("docs/inspecting.md", script).text, tmp_path)
    (again,) = episodes_in(tmp_path / "demonstrations.db")
    (recorded,) = episodes_in(searched)
    assert [turn.completion.token_ids.tolist() for turn in again.turns] == [
        turn.completion.token_ids.tolist() for turn in recorded.turns
    ]
    assert (tmp_path / "runs/sft/final/config.json").exists()


def test_training_on_the_documented_example_reduces_the_loss(tmp_path: Path) -> None:
    """The commands of docs/training.md are run as a user runs them."""
    question = json.loads(block("docs/training.md", '{"messages"').text)
    pairs = {"Neon": "Ne", "Tin": "Sn", "Iron": "Fe"}
    lines = [
        json.dumps(question).replace("Neon", name).replace('"Ne"', f'"{s}"') for name, s in pairs.items()
    ]
    (tmp_path / "demonstrations.jsonl").write_text("\n".join(lines))
    config = block("docs/training.md", "# sft.yaml").text.replace("path/to/model", "quickstart")
    config = config.replace("groups: 16", "groups: 3").replace(
        "steps: 20, lr: 1.0e-5", "steps: 5, lr: 1.0e-3"
    )
    (tmp_path / "sft.yaml").write_text(config)
    bash(block("docs/training.md", "areal-agents episodes import demonstrations.jsonl").text, tmp_path)
    rows = [json.loads(row) for row in (tmp_path / "runs/sft/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.6 * losses[0]
    assert {row["kl_behavior_k3"] for row in rows} == {row["logprob_diff_mean"] for row in rows} == {None}
    assert {row["versions_per_rollout"] for row in rows} == {0}
    assert (tmp_path / "runs/sft/final/config.json").exists()
