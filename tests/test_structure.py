"""What keeps the code readable, checked: its density, its layout, and versions that install."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.readability import (
    MAX_CHARACTERS,
    MAX_CHARACTERS_A_LINE,
    MAX_PER_1000_LINES,
    MIN_COMMENT_LINES_PER_1000,
    measure,
)

ROOT = Path(__file__).parents[1]
MAX_POSITIONAL_PARAMETERS = 5


def test_a_line_of_code_says_one_idea() -> None:
    counts = measure(ROOT / "vit")
    thousands = counts["code lines"] / 1000
    density = {name: counts[name] / thousands for name in MAX_PER_1000_LINES}
    too_dense = {name: value for name, value in density.items() if value > MAX_PER_1000_LINES[name]}
    assert too_dense == {}
    assert counts["characters of code"] / counts["code lines"] <= MAX_CHARACTERS_A_LINE
    assert counts["comment lines"] / thousands >= MIN_COMMENT_LINES_PER_1000


def test_the_package_stays_small_enough_to_know() -> None:
    assert measure(ROOT / "vit")["characters of code"] <= MAX_CHARACTERS


def list_imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it; "a.b" and "a.b.name" for `from a.b import name`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_import_circle_hides_inside_functions() -> None:
    """import-linter sees the layers; this sees each module. The root package is left out: it imports
    its public names when they are asked for."""
    paths = {}
    for path in sorted((ROOT / "vit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path
    del paths["vit"]

    imports = {
        module: {name for name in list_imports(path) if name in paths and name != module}
        for module, path in paths.items()
    }
    # raises CycleError, which names the circle
    order = list(TopologicalSorter(imports).static_order())
    assert len(order) == len(paths) > 100


def test_no_function_takes_too_many_positional_arguments() -> None:
    """Without self and cls."""
    too_many = []
    for folder in ("vit", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                    if names[:1] in (["self"], ["cls"]):
                        names = names[1:]
                    if len(names) > MAX_POSITIONAL_PARAMETERS:
                        too_many.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert too_many == []


def test_tests_mirror_the_folders_of_the_package() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")
    }
    missing = {str(folder) for folder in folders if not (ROOT / "vit" / folder).is_dir()}
    # what needs a GPU, of every folder, is one call of benchmarks/gpu.py
    assert missing == {"cuda"}


@pytest.mark.parametrize("version", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_pinned_versions_take_every_python_that_the_project_takes(version: str) -> None:
    """Of the packages that are installed here in the pinned version."""
    refusing = {}
    num_checked = 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, pinned = line.partition("==")
        for package in metadata.distributions(name=name):
            if package.version == pinned:
                num_checked += 1
                wanted = package.metadata["Requires-Python"] or ""
                if version not in SpecifierSet(wanted):
                    refusing[name] = wanted
    assert refusing == {}
    assert num_checked > 50
