"""Tables as text files, whichever program wrote them: encoding, delimiter, quotes and header are
recognised."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.images import is_image_name
from vit.runtime.arguments import shorten
from vit.runtime.documents import parse_json
from vit.runtime.files import read_bytes

TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl")
# refused with what to do
WORKBOOK_SUFFIXES = (".xlsx", ".xls", ".ods")

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# the longer marks first: that of UTF-32 begins as that of UTF-16
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# rows by which delimiter and header are recognised
_SAMPLE = 50
_HEADER_ROWS = 10
# str.strip leaves these two
_INVISIBLE = "\ufeff\u200b"

# (number of the line, fields)
Row = tuple[int, list[Any]]


class Table(NamedTuple):
    """The content of a table.

    Attributes:
        columns: Names of the columns; empty for a table without a header.
        width: Number of the columns.
        rows: Number of the line and the fields of each row, as many as there are columns.
        guesses: How the file was read, where that isn't plain: "semicolons between columns".
        short: Rows with too few or too many fields, which aren't in `rows`.
    """

    path: Path
    columns: tuple[str, ...]
    width: int
    rows: list[Row]
    guesses: tuple[str, ...]
    short: list[Row]


def read_table_file(
    path: Path, *, count_known: Callable[[Sequence[str]], int], has_header: bool | None = None
) -> Table:
    """Read a table.

    Args:
        path: A file with one of `TEXT_SUFFIXES`.
        count_known: Function that counts the known names in a row, by which a header is found.
        has_header: False: the first row is no header. None: it is found out.

    Raises:
        ValueError: It isn't a table; the message names it.
        OSError: It can't be read.
    """
    if path.suffix.lower() in WORKBOOK_SUFFIXES:
        raise ValueError(f"{path} is a workbook; save its sheet as a CSV file")
    text, guesses = _decode(path)
    if path.suffix.lower() == ".jsonl":
        return _read_json_lines(path, text, guesses)
    # the lines of old programs end with a carriage return alone
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    rows, delimiter = _split_rows(path, text, count_known)
    if delimiter != ",":
        name = _DELIMITERS.get(delimiter, repr(delimiter))
        guesses.append(f"{name if delimiter else 'spaces'} between columns")

    rows, num_spaces = _strip(rows)
    if num_spaces:
        guesses.append(f"spaces around {num_spaces:,} values removed")
    header = None if has_header is False else _find_header(rows, count_known)
    if header is None:
        width = Counter(len(fields) for _, fields in rows).most_common(1)[0][0] if rows else 0
        columns: tuple[str, ...] = ()
        guesses.append("no header")
    else:
        line, names = rows[header]
        if header:
            guesses.append(f"header in line {line}")
        rows = rows[header + 1 :]
        # R's write.table gives the column of row numbers no name
        numbers = [fields[0] for _, fields in rows if len(fields) == len(names) + 1]
        if numbers == [str(number) for number in range(1, len(rows) + 1)] != []:
            names = ["", *names]
            guesses.append("row numbers in the first column")
        columns, width = tuple(names), len(names)

    whole: list[Row] = []
    short: list[Row] = []
    for line, fields in rows:
        # a delimiter at the end of each line
        while len(fields) > width and not fields[-1]:
            fields.pop()
        (whole if len(fields) == width else short).append((line, fields))
    return Table(path, columns, width, whole, tuple(guesses), short)


def _decode(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and its encoding if that isn't UTF-8."""
    content = read_bytes(path)
    if content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise ValueError(f"{path} is a workbook or an archive; save its sheet as a CSV file")
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "")
    if not encoding:
        # every other byte of UTF-16 is zero, in most languages of the West
        zeros = [content[start:2000:2].count(0) for start in (0, 1)]
        encoding = "utf-8"
        if max(zeros) > len(content[:2000]) / 5:
            encoding = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        # in another encoding, hardly any characters look like those of UTF-8
        if any(ord(character) > 127 for character in content.decode("utf-8", "ignore")):
            text = f"{path} is UTF-8 with lines of another encoding, or damaged"
            raise ValueError(f"{text}; save it as UTF-8") from None
        # Western programs of Windows; a few bytes have no character there
        encoding = "cp1252"
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text: {error}; save it as UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{path} is not a text: it holds zero bytes; save it as UTF-8")
    names = {"cp1252": "Windows-1252 instead of UTF-8"}
    is_utf8 = encoding.startswith("utf-8")
    return text, [] if is_utf8 else [f"text in {names.get(encoding, encoding.upper())}"]


def _split_rows(
    path: Path, text: str, count_known: Callable[[Sequence[str]], int]
) -> tuple[list[Row], str]:
    """Split a text into rows and fields.

    Returns:
        The rows that aren't blank, and the delimiter; "" for spaces.
    """
    lines = text.split("\n", _SAMPLE)
    # Excel's own line about the delimiter
    match = re.fullmatch(r'"?sep=(.)"?', lines[0].strip(_INVISIBLE))
    if match:
        text = text.partition("\n")[2]
        return _parse(path, text, match[1], first=2), match[1]

    sample = "\n".join(lines[:_SAMPLE])
    best, best_score = ",", (0, 0.0, 0)
    for delimiter in _DELIMITERS:
        rows = _parse(path, sample, delimiter, is_sample=True)
        widths = Counter(len(fields) for _, fields in rows)
        width, count = widths.most_common(1)[0] if widths else (0, 0)
        if width < 2:
            continue
        known = max(count_known(fields) for _, fields in rows[:_HEADER_ROWS])
        score = (known, count / len(rows), width)
        if score > best_score:
            best, best_score = delimiter, score
    if best_score[0] or best_score[2]:
        return _parse(path, text, best), best

    # some programs put whole lines into quotes
    rows = _parse(path, text, ",")
    cells = [fields[0] for _, fields in rows if len(fields) == 1]
    if cells and len(cells) == len(rows) and any("," in cell for cell in cells):
        split = [next(csv.reader([cell]), []) for cell in cells]
        return [(line, list(each)) for (line, _), each in zip(rows, split, strict=True)], ","
    # "images/a b.jpg 3", as lists of image files are written
    if path.suffix.lower() == ".txt":
        parts = [(line, fields[0].rsplit(None, 1)) for line, fields in rows if fields]
        if parts and all(len(fields) == 2 for _, fields in parts):
            return [(line, list(fields)) for line, fields in parts], ""
    return rows, ","


def _parse(
    path: Path, text: str, delimiter: str, *, first: int = 1, is_sample: bool = False
) -> list[Row]:
    quote = "'" if re.match(rf"\s*'[^']*'\s*(?:{re.escape(delimiter)}|\n)", text) else '"'
    # a quote counts at the start of a field alone
    has_spaced_quotes = re.search(rf"{re.escape(delimiter)} +{quote}", text) is not None
    reader = csv.reader(
        io.StringIO(text),
        delimiter=delimiter,
        quotechar=quote,
        skipinitialspace=has_spaced_quotes,
    )
    rows: list[Row] = []
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                rows.append((reader.line_num + first - 1, fields))
    except csv.Error as error:
        if not is_sample:
            line = reader.line_num + first - 1
            raise ValueError(
                f"{path} line {line} is not a row of a CSV table: {error}; correct it"
            ) from error
    return rows


def _strip(rows: list[Row]) -> tuple[list[Row], int]:
    """Remove spaces around values, and count the values that had some."""
    num_spaces = 0
    stripped: list[Row] = []
    for line, fields in rows:
        values = [field.strip().strip(_INVISIBLE).strip() for field in fields]
        num_spaces += sum(a != b for a, b in zip(fields, values, strict=True))
        stripped.append((line, values))
    return stripped, num_spaces


def _find_header(rows: list[Row], count_known: Callable[[Sequence[str]], int]) -> int | None:
    """Find the row with the names of the columns; None if there is none."""
    first_rows = rows[:_HEADER_ROWS]
    # a title or a comment may stand above it
    for index, (_, fields) in enumerate(first_rows):
        if count_known(fields) >= 2:
            return index
    if not rows or any(is_image_name(field) for field in rows[0][1]):
        return None
    return 0


def _read_json_lines(path: Path, text: str, guesses: list[str]) -> Table:
    columns: dict[str, None] = {}
    values: list[tuple[int, dict[str, Any]]] = []
    # not splitlines, which also cuts at characters that JSON holds as they are, such as U+2028
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, origin=f"{path} line {number}")
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number} is not a JSON object: {shorten(line)}")
        columns |= dict.fromkeys(row)
        values.append((number, row))
    rows = []
    num_spaces = 0
    for number, row in values:
        fields = [row.get(column) for column in columns]
        stripped = [field.strip() if isinstance(field, str) else field for field in fields]
        num_spaces += fields != stripped
        rows.append((number, stripped))
    if num_spaces:
        guesses.append(f"spaces around values of {num_spaces:,} rows removed")
    return Table(path, tuple(columns), len(columns), rows, tuple(guesses), [])
