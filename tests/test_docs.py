"""The documentation does what it says: its Python runs, its commands exist, its links lead
somewhere.

The Python blocks of a page run one after the other in one namespace, as in a notebook, in a
directory that holds a trained model in runs/digits and a photograph.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from generate import render_commands, render_configuration, render_supported_models
from PIL import Image
from sklearn.datasets import load_sample_images

from vit.cli.main import app
from vit.config import load_config
from vit.data.sources.registry import find_kind
from vit.training.recipe import find_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The pages whose commands are executed one after the other, on one model
IN_ORDER = ("tutorials/your-photos.md", "tutorials/pretrained.md", "guides/evaluate.md")

# Commands are parsed, and executed where their model is runs/digits*. These are not executed:
NOT_EXECUTED = {
    "vit train --output runs/digits --resume": "a run of this test has finished already",
    "vit faithfulness runs/digits --num-images 64 --output runs/digits-faithfulness": "tests of the command do",
}
SHORTER = {
    'output="runs/from-python")': 'output="runs/from-python", overrides=["train.epochs=2"])'
}  # in README.md


class Block(NamedTuple):
    language: str
    line: int
    text: str


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a Markdown page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], text.count("\n", 0, match.start()) + 2, match[2])
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def read_commands(page: Path) -> list[list[str]]:
    """The `vit …` commands of a page's shell blocks, as arguments."""
    lines = [
        line
        for block in read_blocks(page)
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    commands = [shlex.split(line, comments=True) for line in lines]
    commands = [
        command[command.index("-m") + 1 :] if "torchrun" in command else command
        for command in commands
    ]
    return [command[1:] for command in commands if command[:1] == ["vit"]]


PYTHON = [page for page in PAGES if any(block.language == "python" for block in read_blocks(page))]
COMMANDS = [(page, command) for page in PAGES for command in read_commands(page)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cli: Any) -> Iterator[Path]:
    """The directory in which the documentation's examples run."""
    folder = tmp_path_factory.mktemp("docs")
    with Image.open(ROOT / "docs" / "images" / "tench.png") as image:
        image.convert("RGB").crop((0, 0, 240, 240)).save(folder / "photo.png")
    for label, pixels in zip("ab", load_sample_images().images, strict=True):
        (folder / "PHOTOS" / label).mkdir(parents=True)
        for number in range(20):
            part = Image.fromarray(
                pixels[10 * number : 10 * number + 100, 20 * number : 20 * number + 100]
            )
            part.save(folder / "PHOTOS" / label / f"{number}.jpg")
    before = Path.cwd()
    os.chdir(folder)
    cli.succeed("train", "digits", "train.epochs=3", "train.device=cpu", "--output", "runs/digits")
    yield folder
    os.chdir(before)


def test_readme_fits_on_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.docs
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_examples_run(page: Path, place: Path) -> None:
    blocks = [block for block in read_blocks(page) if block.language == "python"]
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks:
        text = block.text
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        # padded, so that a traceback names the page's own line
        exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=lambda value: getattr(value, "name", None)
)
def test_commands_are_parsed(page: Path, command: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    name, *arguments = command
    assert name in group.commands
    context = group.commands[name].make_context(
        name, list(arguments)
    )  # raises for an unknown option
    if name == "train":
        config, overrides = context.params["config"], context.params["overrides"] or []
        # PHOTOS or an address is not a configuration, and the first override may stand in its
        # place
        if (
            config is not None
            and not config.partition("/")[0].isupper()
            and not re.search("=|://", config)
            # the name of a data set
            and find_kind(config) != config
        ):
            load_config(find_recipe(config), overrides)


@pytest.mark.docs
def test_commands_on_the_digits_and_on_photos_run(place: Path, cli: Any) -> None:
    commands = [command for page in IN_ORDER for command in read_commands(ROOT / "docs" / page)]
    for command in commands:
        is_known = any(
            argument.startswith("runs/digits") or argument in ("PHOTOS", "recipes")
            for argument in command
        )
        if not is_known or f"vit {shlex.join(command)}" in NOT_EXECUTED:
            continue
        short = (
            ["train.epochs=1", "train.device=cpu", "--overwrite"] if command[0] == "train" else []
        )
        cli.succeed(*command, *short)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_make_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(
        r"`((?:vit|benchmarks|research|notebooks|tests|configs|docs)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for script in re.findall(r"python ((?:benchmarks|research)/\w+\.py)", text):
        assert (ROOT / script).is_file(), f"{page.name} names {script}"
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make (\w+)`", text)) <= targets


# Things that are gone: a page that still names one is out of date.
STALE_WORDS = (
    "attention maps in TensorBoard",
    "benchmark-record",
    "check_cache",
    "check-cache",
    "cifar10/best",
    "cifar100/best",
    "explain_images",
    "imagenette/gpu",
    "learning curves and attention maps",
    "MapOptions",
    "vit.options",
    "vit/factory",
    "vit/pages",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_nothing_that_is_gone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [word for word in STALE_WORDS if word in text] == []
    # `vit.name.name`: a module, a public name, or something in it
    for name in set(re.findall(r"`(vit(?:\.[a-zA-Z_]\w*)+)[`(]", text)):
        assert find_name(name), f"{page.name} names {name}"


def find_name(name: str) -> bool:
    """Tell if a dotted name is a module or an attribute."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_error_messages_in_troubleshooting_are_those_of_the_code() -> None:
    code = " ".join(path.read_text() for path in sorted((ROOT / "vit").rglob("*.py")))
    code = re.sub(r"[\"']\s*f?[\"']", "", " ".join(code.split()))  # joined, as the compiler does
    messages = re.findall(
        r"^\| `(.+?)` \|",
        (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(),
        re.MULTILINE,
    )
    assert len(messages) > 20
    for message in messages:
        # what is left between names, numbers and paths; a message may be put together at a comma
        constants = re.split(
            r"(?<!\w)'[^']*'|[^\s,;]*[\d/.=…][^\s,;]*|--\w+|[A-Z]{4,}|\bx\b|[,;]", message
        )
        assert max(constants, key=len).strip(" ()") in code, message


@pytest.mark.parametrize(
    ("page", "render"),
    [
        ("reference/configuration.md", render_configuration),
        ("reference/commands.md", render_commands),
        ("explanations/supported-models.md", render_supported_models),
    ],
)
def test_generated_pages_are_up_to_date(page: str, render: Callable[[], str]) -> None:
    assert (ROOT / "docs" / page).read_text() == render(), "run `make docs`"
