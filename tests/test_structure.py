"""What keeps the code readable, checked: sizes, the field's words, and tests where one looks for them."""

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
CODE = sorted(path for folder in ("vit", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
LINES_OF_A_FILE, LINES_OF_A_FUNCTION, POSITIONAL_PARAMETERS = 300, 60, 5
# folder or file → the most lines that it may have in all; vit: 11,979 for what 13,613 lines did at 87603b9. Since then
# 1,800 for Libra and removal gradients, readouts that are measured and checks of all input; 2,600 for configurations
# that are chosen, tables and Hugging Face data sets, ONNX of whole pictures, Hub folders, vit serve and any module;
# 450 for threads that divide a batch, one copy of a batch to a device, processes that hang or are slow; 1,200 for
# images that are listed instead of decoded before training, and shards read from object storage; 100 for training that
# starts without torch's compiler and sharding, and FLOPs without running a model
LINES = {"vit": 18_300, "vit/cli": 750, "vit/model/vision_transformer.py": 250, "README.md": 120}

# what the field has another word for, or no need to say so
WORDS = (
    "rungs?|ladders?|levers?|rivals?|arms?|textbook|scrambled?|oracles?|harness|controls|backing|glance|likeness|"
    "hash_appearance|knobs?|by heart|shared out|kinds of damage|can't be had|nobody is fooled|mean surprise|"
    "people|persons?"
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "vit").rglob("*.html")]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def find_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Where it stands, and the function; methods and functions inside others too."""
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{relative(path)}:{node.lineno} {node.name}", node


def test_no_file_is_too_long() -> None:
    lengths = {relative(path): count_lines(path) for path in CODE}
    assert {path: lines for path, lines in lengths.items() if lines > LINES_OF_A_FILE} == {}


def test_no_function_is_too_long() -> None:
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in find_functions()}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_OF_A_FUNCTION} == {}


def test_no_function_takes_too_many_positional_arguments() -> None:
    """Without self and cls."""
    counts = {}
    for name, node in find_functions():
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        counts[name] = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
    assert {name: count for name, count in counts.items() if count > POSITIONAL_PARAMETERS} == {}


@pytest.mark.parametrize(("name", "limit"), LINES.items(), ids=LINES)
def test_the_whole_stays_small(name: str, limit: int) -> None:
    path = ROOT / name
    assert sum(map(count_lines, path.rglob("*.py") if path.is_dir() else [path])) <= limit


def test_only_words_that_the_field_uses() -> None:
    pattern = re.compile(rf"\b({WORDS})\b", re.IGNORECASE)
    found = [
        f"{relative(path)}:{number} {match[0]}"
        for path in (*CODE, *PAGES)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in pattern.finditer(line)
    ]
    assert found == []


def test_tests_mirror_the_folders_of_the_package() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders if not (ROOT / "vit" / folder).is_dir()) == []


def test_no_two_modules_of_a_room_share_a_name() -> None:
    """`report` in one place, `export` in one place: a name says where it is."""
    names: dict[str, list[str]] = {}
    for path in (ROOT / "vit").rglob("*.py"):
        if path.stem not in ("__init__", "__main__") and path.parent.name != "cli":
            names.setdefault(path.stem, []).append(relative(path))
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("version", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_pinned_versions_take_every_python_that_the_project_takes(version: str) -> None:
    """Of the packages that are installed here in the pinned version."""
    refusing, checked = {}, 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, pinned = line.partition("==")
        for package in metadata.distributions(name=name):
            if package.version == pinned:
                checked += 1
                wanted = package.metadata["Requires-Python"] or ""
                if version not in SpecifierSet(wanted):
                    refusing[name] = wanted
    assert refusing == {}
    assert checked > 50
