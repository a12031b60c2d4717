"""Every recipe of examples/ is complete and documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipes_cost import RECIPES as ESTIMATED
from benchmarks.recipes_cost import line, tables

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent for path in (ROOT / "examples").glob("*/config.yaml"))
SMALL_FORM = {"search_agent"}  # the quick start; its configurations for GPUs are those of deep_search


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_a_recipe_is_complete(recipe: Path) -> None:
    """A recipe has a page, configurations for three machines, a smoke test, and rows in two tables."""
    assert (recipe / "README.md").is_file()
    if recipe.name not in SMALL_FORM:
        assert {"config.24gb.yaml", "config.node.yaml"} <= {path.name for path in recipe.iterdir()}
    assert list((ROOT / "tests" / "examples").glob(f"test_{recipe.name}*.py"))
    for page in (ROOT / "README.md", ROOT / "docs" / "recipes.md"):
        assert f"examples/{recipe.name}/" in page.read_text(), f"{page.name} does not name {recipe.name}"


def test_the_documented_estimates_for_gpus_are_current() -> None:
    """`python -m benchmarks recipes` computes tables of docs/recipes.md and a line of each README."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    for table in "\n".join(tables()).split("\n\n"):
        assert f"\n\n{table}\n\n" in page, (
            "write the output of python -m benchmarks recipes into docs/recipes.md"
        )
    for folder in {recipe.folder for recipe in ESTIMATED}:
        readme = " ".join((ROOT / "examples" / folder / "README.md").read_text().split())
        assert line(folder) in readme, f"examples/{folder}/README.md lacks: {line(folder)}"


def test_every_recipe_with_a_profile_is_estimated() -> None:
    """Recipes without `profile` serve traffic and train without an end, so they have no estimate."""
    main = {f"{recipe.name}/config.{kind}.yaml" for recipe in RECIPES for kind in ("24gb", "node")}
    given = {path for path in main if (ROOT / "examples" / path).is_file()}
    profiled = {path for path in given if "profile:" in (ROOT / "examples" / path).read_text()}
    assert profiled <= {recipe.path for recipe in ESTIMATED}
