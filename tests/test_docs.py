"""The documentation does what it says: its Python runs, its commands exist, its links lead
somewhere.

The examples of a page run one after the other, commands and Python (in one namespace, as in a
notebook), in a directory that holds photographs and trained models.
"""

import io
import json
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from generate import (
    render_files,
    render_supported_models,
)
from PIL import Image
from sklearn.datasets import load_sample_images

from vit.cli.main import app
from vit.config import load_config
from vit.data.open import find_kind
from vit.training.recipe import find_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The pages on which every measured number has a mark, see below
WITH_MARKS = [
    page
    for page in PAGES
    if re.match(
        "docs/(index|install|tutorials|guides|explanations|results)",
        page.relative_to(ROOT).as_posix(),
    )
]

# Commands are parsed, and executed but for these: a pattern, and why
NOT_EXECUTED = {
    "timm:|hf:|fashion_mnist|cifar10|imagenette/cpu|IMAGENET|CIFAR10": (
        "the images or weights have to be downloaded"
    ),
    "^serve": "it serves until Ctrl-C",
    "^faithfulness": "it takes minutes; the tests of the command are quicker",
}
# for `vit train`: prediction sets need 19 of the 40 photos for validation
SHORT = ["train.epochs=1", "train.device=cpu", "data.validation_fraction=0.7"]
SHORTER = {
    # in README.md
    'output="runs/from-python")': 'output="runs/from-python", overrides=["train.epochs=2"])',
    # a training of five minutes
    "minutes=5)": "minutes=0.02)",
}


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


def read_commands(block: Block) -> list[list[str]]:
    """The `vit …` commands of a shell block, as arguments."""
    if block.language != "sh":
        return []
    text = block.text.replace("$PHOTOS", "PHOTOS")
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    # without what the shell does with their output
    commands = [list(takewhile(lambda word: word not in (">", "|"), words)) for words in commands]
    commands = [
        words[words.index("-m") + 1 :] if "torchrun" in words else words for words in commands
    ]
    return [words[1:] for words in commands if words[:1] == ["vit"]]


BLOCKS = [(page, block) for page in PAGES for block in read_blocks(page)]
COMMANDS = [(page, command) for page, block in BLOCKS for command in read_commands(block)]
WITH_EXAMPLES = list(
    dict.fromkeys(page for page, block in BLOCKS if block.language in ("python", "sh"))
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cli: Any) -> Iterator[Path]:
    """The directory in which the documentation's examples run."""
    folder = tmp_path_factory.mktemp("docs")
    with Image.open(ROOT / "docs" / "photos" / "church.jpg") as image:
        image.save(folder / "photo.png")
    labels = []
    for label, pixels in zip(("cat", "dog"), load_sample_images().images, strict=True):
        for number in range(20):
            part = Image.fromarray(
                pixels[10 * number : 10 * number + 100, 20 * number : 20 * number + 100]
            )
            path = folder / "PHOTOS" / label / f"site{number // 4}" / f"{label}.{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.save(path)
            labels.append((path, label))
    shutil.copytree(folder / "PHOTOS" / "cat", folder / "NEW-PHOTOS")
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "corrections.csv").write_text("path,given,label\ncat/site0/cat.0.jpg,cat,dog\n")
    _write_shards(folder / "SHARDS", labels)
    rows = [{"image": {"bytes": path.read_bytes()}, "label": label} for path, label in labels]
    pq.write_table(pa.Table.from_pylist(rows), folder / "PHOTOS.parquet")
    before = Path.cwd()
    os.chdir(folder)
    cli.succeed("train", "digits", "train.epochs=3", "train.device=cpu", "--output", "runs/digits")
    cli.succeed("train", "PHOTOS", *SHORT, "--output", "runs/photos")
    yield folder
    os.chdir(before)


def _write_shards(folder: Path, labels: list[tuple[Path, str]]) -> None:
    folder.mkdir()
    for number in range(2):
        with tarfile.open(folder / f"train-{number:04}.tar", "w") as tar:
            for path, label in labels[number::2]:
                for suffix, content in (("jpg", path.read_bytes()), ("cls", label.encode())):
                    member = tarfile.TarInfo(f"{path.stem.replace('.', '-')}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def test_readme_fits_on_a_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore:there is no screen")
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page: Path, place: Path, cli: Any) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in read_blocks(page):
        if block.language == "python":
            text = block.text
            for long, short in SHORTER.items():
                text = text.replace(long, short)
            # padded, so that a traceback names the page's own line
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), namespace)
        for command in read_commands(block):
            text = shlex.join(command)
            if any(re.search(pattern, text) for pattern in NOT_EXECUTED):
                continue
            is_new_run = command[0] == "train" and "--resume" not in command
            short = SHORT[: 2 if "--folds" in command else 3] if is_new_run else []
            # predictions are never overwritten
            writes = "--output" in command and command[0] != "predict"
            if writes and "--resume" not in command:
                command = [*command, "--overwrite"]
            cli.succeed(*command, *short)


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
            and not re.split("[/.]", config)[0].isupper()
            and not re.search("=|://", config)
            # the name of a data set
            and find_kind(config) != config
        ):
            load_config(find_recipe(config), overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_make_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"`((?:vit|benchmarks|notebooks|tests|configs|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for script in re.findall(r"python (benchmarks/\w+\.py)", text):
        assert (ROOT / script).is_file(), f"{page.name} names {script}"
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make (\w+)`", text)) <= targets


# Things that are gone: a page that still names one is out of date.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_nothing_that_is_gone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
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
    assert len(messages) >= 4
    for message in messages:
        # what is left between names, numbers and paths; a message may be put together at a comma
        constants = re.split(
            r"(?<!\w)'[^']*'|[^\s,;]*[\d/.=…][^\s,;]*|--\w+|[A-Z]{4,}|\bx\b|[,;]", message
        )
        assert max(constants, key=len).strip(" ()") in code, message


# A measured number has a mark behind it: a file of benchmarks/results and the keys to the value, as
# in "84.3 %<!-- package-model-x.json top1 -->". A percentage may be a fraction in the file.
MARK = r"<!-- ([\w.-]+\.json) (\S.*?) -->"
MARKED = r"(\d[\d,]*(?:\.\d+)?)( %)?[^\d|<>]*" + MARK
TABLE = re.compile(r"<!-- \w+: .*?-->.*?<!-- end -->", re.DOTALL)  # it is generated
# Percentages that the code states: intervals, default fractions and thresholds
STATED = {"1 %", "5 %", "10 %", "20 %", "25 %", "40 %", "80 %", "90 %", "95 %", "100 %"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_marked_numbers_are_those_of_their_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    marked = re.findall(MARKED, text)
    assert len(marked) == len(re.findall(MARK, text)), "a mark has no number in front of it"
    for number, percent, file, keys in marked:
        value: Any = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
        for key in keys.split("/"):
            value = value[int(key) if isinstance(value, list) else key]
        decimals = len(number.partition(".")[2])
        possible = {round(value, decimals), *([round(100 * value, decimals)] if percent else ())}
        assert float(number.replace(",", "")) in possible, f"{file} {keys}"


@pytest.mark.parametrize("page", WITH_MARKS, ids=lambda page: page.name)
def test_a_measured_number_has_a_mark(page: Path) -> None:
    text = TABLE.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    rest = re.sub(MARKED, "", text)
    assert set(re.findall(r"\d[\d,.]* (?:%|images/s|GiB)", rest)) <= STATED


@pytest.mark.parametrize(
    ("page", "render"),
    [
        ("reference/files.md", render_files),
        ("explanations/supported-models.md", render_supported_models),
    ],
)
def test_generated_pages_are_up_to_date(page: str, render: Callable[[], str]) -> None:
    assert (ROOT / "docs" / page).read_text() == render(), "run `make docs`"
