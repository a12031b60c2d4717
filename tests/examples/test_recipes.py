"""Every recipe of examples/ has its configurations, which load, its page, and its places in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from areal_agents.config import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path.parent for path in EXAMPLES.glob("*/config.yaml"))
CONFIGURATIONS = sorted(EXAMPLES.glob("*/config*.yaml"))
SMALL_FORM = {"search_agent"}  # the quick start; its GPU configurations are those of deep_search


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_configuration_loads(path: Path) -> None:
    profile = yaml.safe_load(path.read_text()).get("profile")
    overrides = ["engine.python=/nowhere/bin/python"] if profile else []
    config = load_config(path, overrides)
    if path.name == "config.24gb.yaml":
        assert profile == "24gb" and config.trainer.lora is not None
    if path.name == "config.node.yaml":
        assert profile == "node" and config.trainer.ranks * 2 == 8


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_a_recipe_is_whole(recipe: Path) -> None:
    """A recipe has a page, configurations for three machines, a smoke test, and rows in two tables."""
    assert (recipe / "README.md").is_file()
    if recipe.name not in SMALL_FORM:
        assert {"config.24gb.yaml", "config.node.yaml"} <= {path.name for path in recipe.iterdir()}
    assert list((ROOT / "tests" / "examples").glob(f"test_{recipe.name}*.py"))
    for page in (ROOT / "README.md", ROOT / "docs" / "recipes.md"):
        assert f"examples/{recipe.name}/" in page.read_text(), f"{page.name} does not name {recipe.name}"
