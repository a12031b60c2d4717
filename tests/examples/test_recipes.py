"""Every recipe of examples/ is whole, and has its places in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent for path in (ROOT / "examples").glob("*/config.yaml"))
SMALL_FORM = {"search_agent"}  # the quick start; its configurations for GPUs are those of deep_search


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_a_recipe_is_whole(recipe: Path) -> None:
    """A recipe has a page, configurations for three machines, a smoke test, and rows in two tables."""
    assert (recipe / "README.md").is_file()
    if recipe.name not in SMALL_FORM:
        assert {"config.24gb.yaml", "config.node.yaml"} <= {path.name for path in recipe.iterdir()}
    assert list((ROOT / "tests" / "examples").glob(f"test_{recipe.name}*.py"))
    for page in (ROOT / "README.md", ROOT / "docs" / "recipes.md"):
        assert f"examples/{recipe.name}/" in page.read_text(), f"{page.name} does not name {recipe.name}"
