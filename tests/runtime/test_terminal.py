"""Names of strangers on the terminal and in tables: no control characters, no formulas."""

import csv
import io
import itertools
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vit.evaluation.metrics import score_logits
from vit.evaluation.predictions import write_predictions
from vit.prediction.records import Prediction, write_csv, write_jsonl
from vit.runtime.arguments import is_control_character, replace_control_characters
from vit.runtime.console import build_console, build_table, echo
from vit.runtime.documents import escape_formula, read_table
from vit.runtime.progress import LOGGER, show_progress

ROOT = Path(__file__).parents[2]
# ESC, the 8-bit CSI, DEL, right-to-left override and isolate, line separator
CONTROLS = ["\x1b[31m", "\x9b31m", "\x7f", "\u202e", "\u2067", "\u2028", "\x07", "\r"]
FORMULAS = ["=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x", "-", "=\"'\n"]
PLAIN = ["ant", "-1", "+2.5e3", "-inf", "'quoted'", "a=b", "", "é", "'", " =1"]


def test_characters_that_a_terminal_obeys_are_replaced() -> None:
    for control in CONTROLS:
        assert replace_control_characters(f"a{control}b").startswith("a�")
    kept = "newline\n, no-break\u00a0space, e\u0301, می\u200cخواهم, 👩\u200d🔬, 日本"
    assert replace_control_characters(kept) == kept
    assert replace_control_characters("\udcff") == "�"


def test_all_that_is_printed_goes_through_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    name = "".join(CONTROLS)
    console = build_console()
    console.print(name)
    console.print(build_table([[name, 1]], (name, "n"), title=name))
    echo(name)
    echo(name, err=True, color="yellow")
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert printed.count("�") >= 5 * len(CONTROLS)
    assert not [letter for letter in printed if is_control_character(letter)]

    # no other line of the package prints; these replace control characters themselves
    allowed = {
        ("cli/main.py", 1),
        ("training/observers.py", 1),
        ("deploy/export/templates/predict.py", 1),
        ("runtime/console.py", 1),
    }
    found = set()
    for path in (ROOT / "vit").rglob("*.py"):
        pattern = r"^(?!.*>>> ).*(?:(?<![.\w])print\(|secho\(|typer\.echo\()"
        calls = re.findall(pattern, path.read_text(), re.MULTILINE)
        if calls:
            found.add((str(path.relative_to(ROOT / "vit")), len(calls)))
    assert found == allowed


def test_a_cell_is_no_formula_and_is_read_back_as_it_was(tmp_path: Path) -> None:
    for text in FORMULAS:
        assert escape_formula(text) == f"'{text}"
    for text in PLAIN:
        assert escape_formula(text) == text
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[escape_formula(text), "x"] for text in FORMULAS + PLAIN])
    assert [row[0] for _, row in read_table(path)] == FORMULAS + PLAIN


def test_predictions_have_no_formulas_and_no_control_characters(tmp_path: Path) -> None:
    classes = ['=HYPERLINK("http://e/?"&A1)', "\x1b[31mred", "ab\u202ecd"]
    top = [(index, name, 1 / 3) for index, name in enumerate(classes)]
    predictions = [
        Prediction("-photo.png", top, prediction_set=classes, p_value=0.5),
        Prediction("x\x1b]0;title\x07.png", [], error="@error\x9b"),
    ]
    file = io.StringIO()
    list(write_csv(predictions, file=file))
    text = file.getvalue()
    assert not [letter for letter in text if is_control_character(letter)]
    rows = list(csv.reader(io.StringIO(text)))
    cells = [cell for row in rows[1:] for cell in row]
    assert not [cell for cell in cells if cell[:1] in tuple("=+-@\t\r")]
    # numbers are numbers, and other names come back
    path = tmp_path / "predictions.csv"
    path.write_text(text)
    read = [row for _, row in read_table(path)][1:]
    assert read[0][0] == "-photo.png"
    assert read[0][1:3] == [classes[0], repr(1 / 3)]
    assert read[0][6] == "0.5"

    file = io.StringIO()
    list(write_jsonl(predictions, file=file))
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert not [letter for line in lines for letter in line if is_control_character(letter)]
    first, second = map(json.loads, lines)
    assert [row["name"] for row in first["predictions"]] == classes
    assert second == {"path": "x\x1b]0;title\x07.png", "error": "@error\x9b"}


def test_predictions_of_an_evaluation_are_read_back(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    labels = np.arange(20) % 5
    scores = score_logits(logits, labels)
    ids = [f"{name}{number}" for number, name in enumerate((FORMULAS + PLAIN)[: len(labels)])]
    classes = ("=1+1", "-1", "@x", "'=y", "plain")
    path = tmp_path / "predictions.csv"
    write_predictions(path, scores, ids=ids, class_names=classes)
    table = [row for _, row in read_table(path)][1:]
    assert [row[0] for row in table] == ids
    assert [row[1] for row in table] == [classes[label] for label in labels]
    cells = [row[:3] for row in csv.reader(io.StringIO(path.read_text()))]
    assert not [cell for row in cells for cell in row if cell[:1] in tuple("=@\t\r")]


def test_long_work_writes_lines_into_a_log_of_a_command_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vit.runtime.progress.FIRST_LINE", 0.01)
    lines = logging.StreamHandler(sys.stderr)
    for shown, own_lines, is_command in itertools.product((True, False), repeat=3):
        if is_command:
            LOGGER.addHandler(lines)
        monkeypatch.setattr(LOGGER, "level", logging.INFO if is_command else logging.NOTSET)
        LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
        # what an exporter does with the messages of its libraries
        monkeypatch.setattr(logging.root.manager, "disable", 0)
        with show_progress("eye\x1bs", 7, shown=shown, lines=not own_lines) as advance:
            logging.disable(logging.ERROR)
            advance(3)
            time.sleep(0.05)
        LOGGER.removeHandler(lines)
        captured = capsys.readouterr()
        assert captured.out == ""
        expected = shown and not own_lines and is_command
        assert captured.err == ("eye�s: 3 of 7, 0 s\n" if expected else "")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
