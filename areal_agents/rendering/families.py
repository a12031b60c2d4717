"""Chooses the chat format of a model folder: a family of the `renderers` library, or its own chat template.

A wrong template would train the model on a format that it is never served with, so a family is never guessed.
A model type that the library does not know is rendered by the template in its folder; if the folder has none,
an error lists the known families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pydantic
import renderers

from areal_agents.errors import ConfigError
from areal_agents.model_folder import folder_fault, read_object
from areal_agents.rendering.formats import TEMPLATE, ChatFormat, library_format
from areal_agents.rendering.templates.generic import TemplateFormat
from areal_agents.rendering.templates.template import template_sources
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

# config.json's model_type → family. `_BY_NAME` distinguishes the families that share a type.
_BY_MODEL_TYPE = {
    "deepseek_v3": "deepseek-v3",
    "deepseek_v4": "deepseek-v4",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm-4.5",
    "glm4_moe_lite": "glm-5",
    "glm_moe_dsa": "glm-5",
    "gpt_oss": "gpt-oss",
    "hy_v3": "hy3",
    "kimi_k2": "kimi-k2",
    "kimi_k25": "kimi-k2.5",
    "llama": "llama-3",
    "minimax_m2": "minimax-m2",
    "nemotron_h": "nemotron-3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
}

# model_type → (part of the folder's or the checkpoint's name, family); the first match wins.
_BY_NAME = {
    "deepseek_v3": (("deepseek-r1", "deepseek-r1"), ("kimi-k2", "kimi-k2")),
    "glm_moe_dsa": (("glm-5.1", "glm-5.1"), ("glm-5.3", "glm-5.3")),
    "nemotron_h": (("ultra", "nemotron-3-ultra"), ("nemotron-3.5", "nemotron-3.5")),
    "qwen3_5": (("qwen3.6", "qwen3.6"), ("qwen3.8", "qwen3.8")),
    "qwen3_5_moe": (("qwen3.6", "qwen3.6"), ("qwen3.8", "qwen3.8")),
}

# Model types that many different formats share: the library's family renders only templates with this text.
_SIGN_OF_FAMILY = {"llama": "<|start_header_id|>"}

# "auto" would look the name up on a hub, "default" needs transformers, "custom" runs foreign code.
_NOT_OFFERED = {"auto", "default", "custom"}


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """The config of a model folder that is rendered by its own chat template."""

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = TEMPLATE


def known_families() -> list[str]:
    """The names that `family=` accepts besides "auto", sorted."""
    return sorted({*_library_families(), TEMPLATE})


def make_format(tokenizer: Tokenizer, config: Any, *, marked: bool = False) -> ChatFormat:
    """Create the chat format of a config from `renderer_config`.

    A model's own template is probed here, which takes about 200 ms. With `marked`, the format renders marked
    content (see `SpecialText`).

    Raises:
        ConfigError: the tokenizer does not fit the family, or the template is unusable or does not read an
            option.
    """
    if isinstance(config, TemplateConfig):
        return TemplateFormat.from_folder(config.folder, tokenizer, config.options, marked=marked)
    return library_format(tokenizer, config, marked=marked)


def _library_families() -> set[str]:
    configs = get_args(get_args(renderers.RendererConfig)[0])
    return {config.model_fields["name"].default for config in configs} - _NOT_OFFERED


def renderer_config(path: str | Path, *, family: str, options: Mapping[str, Any]) -> Any:
    """The config of a model folder's renderer: the library's, or a `TemplateConfig`. Both have a `name`.

    Args:
        path: the model folder; its config.json decides when `family` is "auto".
        family: "auto", one of the library's families, or "template" for the folder's own chat template.
        options: fields of that family's config, for example `{"enable_thinking": False}`, or variables of
            the template, which are checked when the template is read.

    Raises:
        ConfigError: the path is not a model folder, the family is unknown, the model type is unknown and
            there is no chat template, or the family does not have an option.
    """
    name = _detect(Path(path)) if family == "auto" else family
    if name not in known_families():
        raise ConfigError(f"unknown renderer family {name!r}; expected one of {', '.join(known_families())}")
    if name == TEMPLATE:
        return TemplateConfig(Path(path), dict(options))
    config_class = type(renderers.config_from_name(name))
    try:
        return config_class(**options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        fields = ", ".join(sorted(set(config_class.model_fields) - {"name"}))
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"renderer option {where!r} of family {name}: {first['msg']}; the family has the options {fields}"
        ) from error


def _detect(folder: Path) -> str:
    if fault := folder_fault(folder):
        raise ConfigError(f"{fault}; give the path of a downloaded model")
    config = read_object(folder / "config.json")
    model_type = config.get("model_type")
    name = f"{folder.name} {config.get('_name_or_path', '')}".lower()
    for part, family in _BY_NAME.get(model_type or "", ()):
        if part in name:
            return family
    sources = template_sources(folder)
    sign = _SIGN_OF_FAMILY.get(model_type or "", "")
    other_format = bool(sources) and not any(sign in source for source in sources.values())
    if model_type in _BY_MODEL_TYPE and not other_format:
        return _BY_MODEL_TYPE[model_type]
    if sources:
        return TEMPLATE
    raise ConfigError(
        f"no renderer is known for {folder} (model_type {model_type!r} in config.json), and it has no chat "
        f"template; name its chat format with family: one of {', '.join(known_families())}"
    )
