from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import CHATML, OPTION, write_folder

from areal_agents.core.messages import Message
from areal_agents.errors import ConfigError
from areal_agents.rendering import ChatRenderer, Tokenizer
from areal_agents.rendering.families import known_families, renderer_config


def detected(folder: Path, **config: str) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return renderer_config(folder, family="auto", options={}).name


def test_the_family_comes_from_the_model_type(tmp_path: Path) -> None:
    assert detected(tmp_path / "a", model_type="qwen3_moe") == "qwen3"
    assert detected(tmp_path / "b", model_type="gpt_oss") == "gpt-oss"


def test_the_model_name_distinguishes_families_of_one_model_type(tmp_path: Path) -> None:
    assert detected(tmp_path / "DeepSeek-V3", model_type="deepseek_v3") == "deepseek-v3"
    assert detected(tmp_path / "DeepSeek-R1", model_type="deepseek_v3") == "deepseek-r1"
    assert (
        detected(tmp_path / "tuned", model_type="glm_moe_dsa", _name_or_path="zai-org/GLM-5.1") == "glm-5.1"
    )


def test_the_error_for_an_unknown_model_names_the_known_families(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mamba'.*qwen3"):
        detected(tmp_path / "m", model_type="mamba")
    with pytest.raises(ConfigError, match="unknown renderer family 'qwen33'.*qwen3"):
        ChatRenderer.from_folder(tmp_path / "m", family="qwen33")


def test_an_unknown_model_is_rendered_by_its_own_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CHATML, config={"model_type": "mamba"})
    assert renderer_config(folder, family="auto", options={}).name == "template"
    renderer = ChatRenderer.from_folder(folder)
    assert renderer.family == "template"
    text = renderer.tokenizer.decode(renderer.render([Message("user", "hi")]))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_known_model_keeps_its_family_unless_its_own_template_is_requested(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CHATML, config={"model_type": "qwen3"})
    assert renderer_config(folder, family="auto", options={}).name == "qwen3"
    assert ChatRenderer.from_folder(folder, family="template").family == "template"
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatRenderer.from_folder(write_folder(tmp_path / "n", None), family="template")


def test_the_template_distinguishes_formats_of_one_model_type(tmp_path: Path) -> None:
    llama = {"model_type": "llama"}
    other = write_folder(tmp_path / "smol", CHATML, config=llama)
    assert renderer_config(other, family="auto", options={}).name == "template"
    third = write_folder(tmp_path / "third", "<|start_header_id|>" + CHATML, config=llama)
    assert renderer_config(third, family="auto", options={}).name == "llama-3"
    assert detected(tmp_path / "bare", **llama) == "llama-3"


def test_other_options_of_a_template_make_another_renderer(tmp_path: Path) -> None:
    renderer = ChatRenderer.from_folder(write_folder(tmp_path / "m", OPTION))
    terse = renderer.with_options({"style": "terse"})
    assert terse.tokenizer is renderer.tokenizer
    assert terse.tokenizer.decode(terse.render([Message("user", "hi")])).startswith("Be terse.\n")
    with pytest.raises(ConfigError, match="'thinking' is not read by this chat template; it reads style"):
        renderer.with_options({"thinking": True})


def test_every_known_family_has_a_config(tmp_path: Path) -> None:
    names = [renderer_config(tmp_path, family=family, options={}).name for family in known_families()]
    assert names == known_families() and "auto" not in names


def test_options_reach_the_template_and_wrong_ones_are_named(model_folder: Path) -> None:
    quiet = ChatRenderer.from_folder(model_folder, options={"enable_thinking": False})
    text = quiet.tokenizer.decode(quiet.render([Message("user", "hi")]))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="'thinking'.*enable_thinking"):
        ChatRenderer.from_folder(model_folder, options={"thinking": True})


def test_a_missing_or_broken_folder_is_a_config_error(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=f"^{nowhere} is not a Hugging Face model folder"):
        ChatRenderer.from_folder(nowhere)
    with pytest.raises(ConfigError, match="no config.json"):
        ChatRenderer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ChatRenderer.from_folder(tmp_path)


def test_a_tokenizer_that_does_not_fit_the_family_is_a_config_error(tmp_path: Path, model_writer) -> None:  # type: ignore[no-untyped-def]
    folder = model_writer(tmp_path / "m", model_type="llama")
    with pytest.raises(ConfigError, match="does not fit family llama-3"):
        ChatRenderer.from_folder(folder)


def test_a_tokenizer_has_the_special_tokens_and_sizes_of_its_folder(renderer: ChatRenderer) -> None:
    tokenizer = renderer.tokenizer
    assert renderer.stop_token_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<none>"]) == [tokenizer.eos_token_id, None]
    assert tokenizer.added_token_id("<think>") in tokenizer.added_token_ids - tokenizer.special_token_ids
    assert tokenizer.added_token_id("a") is None and tokenizer.added_token_id("<none>") is None
    assert tokenizer.token_text(tokenizer.eos_token_id) == "<|im_end|>"
    with pytest.raises(ValueError, match=f"from 0 to {tokenizer.vocab_size - 1}, got 999999"):
        tokenizer.token_text(999_999)
    assert renderer.vocab_size == tokenizer.convert_tokens_to_ids("</think>") + 1
    assert tokenizer.decode(tokenizer.encode("  a , b ")) == "  a , b "
