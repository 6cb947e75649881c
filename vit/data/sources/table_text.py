"""Tables as text files, whichever program wrote them: encoding, delimiter, quotes and header are
recognised."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit.data.images import is_image_name
from vit.runtime.arguments import shorten
from vit.runtime.documents import parse_json
from vit.runtime.files import read_bytes
from vit.runtime.places import explain_file

TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl")
# refused with what to do
WORKBOOK_SUFFIXES = (".xlsx", ".xls", ".ods")

# names of columns as `simplify` writes them, the best first
PATH_NAMES = (
    "path", "file_path", "filepath", "image_path", "imagepath", "img_path", "relative_path",
    "rel_path", "filename", "file_name", "fname", "file", "image_file", "image_filename",
    "image_name", "img_name", "imagename", "img_file", "image", "img", "photo", "picture",
    "image_index", "image_id", "img_id", "imageid", "imgid", "photo_id", "picture_id", "id",
)  # fmt: skip
LABEL_NAMES = (
    "label", "labels", "class", "class_name", "classname", "label_name", "category",
    "category_name", "species", "species_name", "target", "target_name", "lbl", "breed",
    "diagnosis", "dx", "finding_labels", "finding", "ground_truth", "groundtruth", "gt",
    "annotation", "tag", "class_label", "y", "class_id", "label_id", "category_id", "classid",
    "target_id", "choice", "common_name", "scientific_name",
    "klasse", "art", "classe", "clase", "espèce", "especie",
)  # fmt: skip

_DELIMITERS = ",;\t|"
_DELIMITER_NAMES = {";": "semicolons", "\t": "tabs", "|": "bars", "": "spaces"}
# the longer marks first: that of UTF-32 begins as that of UTF-16
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Text of another encoding read as Windows-1252: three letters with accents in a row, signs before a
# letter, a capital with an accent inside a word. Cyrillic, Greek, Japanese and old Macs' texts are
# so.
_MISREAD = re.compile(
    r"[À-ÿŒœŠšŸŽž]{3}|[€ƒ‚„†‡ˆ‰‹”•˜™›¡¢£¤¥¦§¨©«¬®¯±´¶·¸¹»¼½¾¿][A-Za-zÀ-ÿ]|[A-Za-z][À-ÝŠŒŽŸ][a-z]"
)
# rows by which delimiter and header are recognised
_SAMPLE = 50
_HEADER_ROWS = 10
# str.strip leaves these two
_INVISIBLE = "\ufeff\u200b"

# (number of the line, fields)
Row = tuple[int, list[Any]]


@dataclass
class Table:
    """The content of a table.

    Attributes:
        columns: Names of the columns; empty for a table without a header.
        width: Number of the columns.
        rows: Number of the line and the fields of each row, as many as there are columns.
        guesses: How the file is read, where that isn't plain: "semicolons between columns".
        short: Rows with too few or too many fields, which aren't in `rows`.
        notes: Warnings for the user.
    """

    path: Path
    columns: Sequence[str]
    width: int
    rows: list[Row]
    guesses: list[str]
    short: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The name of each column, see `simplify`."""
        return [simplify(column) for column in self.columns] or [""] * self.width

    def values(self, place: int) -> list[Any]:
        """Return the values of a column."""
        return [fields[place] for _, fields in self.rows]


def simplify(name: Any) -> str:
    """Return the name of a column in small letters, with underscores for spaces and hyphens."""
    return re.sub(r"[\s._-]+", "_", str(name).strip().casefold()).strip("_")


def count_known(fields: Sequence[Any]) -> int:
    """Count the kinds of columns, image files and classes, that a row names."""
    names = {simplify(field) for field in fields}
    return (not names.isdisjoint(PATH_NAMES)) + (not names.isdisjoint(LABEL_NAMES))


def read_table_file(path: Path, *, has_header: bool = True) -> Table:
    """Read a table.

    Args:
        path: A file with one of `TEXT_SUFFIXES`.
        has_header: False: the first row is no header, whatever it holds.

    Raises:
        ValueError: It isn't a table; the message names it.
        OSError: It can't be read.
    """
    if path.suffix.lower() in WORKBOOK_SUFFIXES:
        raise ValueError(explain_file(path))
    text, guesses = _decode(path)
    if path.suffix.lower() == ".jsonl":
        return _read_json_lines(path, text, guesses)
    # the lines of old programs end with a carriage return alone
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    rows, delimiter = _split_rows(path, text)
    if delimiter != ",":
        guesses.append(f"{_DELIMITER_NAMES.get(delimiter, repr(delimiter))} between columns")
    rows = _strip(rows, guesses)

    header = None
    if has_header:
        header = _find_header(rows)
    if header is None:
        guesses.append("no header")
        widths = Counter(len(fields) for _, fields in rows)
        columns: list[str] = []
        width = max(widths, key=widths.__getitem__, default=0)
    else:
        line, columns = rows[header]
        if header:
            guesses.append(f"header in line {line}")
        rows = rows[header + 1 :]
        # R's write.table gives the column of row numbers no name
        numbers = [fields[0] for _, fields in rows if len(fields) == len(columns) + 1]
        if numbers == [str(number) for number in range(1, len(rows) + 1)] != []:
            columns = ["", *columns]
            guesses.append("row numbers in the first column")
        width = len(columns)

    table = Table(path, columns, width, [], guesses)
    for line, fields in rows:
        # a delimiter at the end of each line
        while len(fields) > width and not fields[-1]:
            fields.pop()
        (table.rows if len(fields) == width else table.short).append((line, fields))
    return table


def _decode(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and its encoding if that isn't UTF-8."""
    content = read_bytes(path)
    if content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise ValueError(
            f"{path} is a spreadsheet or an archive; save the table as CSV and name that file"
        )
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "")
    if not encoding:
        # every other byte of UTF-16 is zero, in most languages of the West
        zeros = [content[start:2000:2].count(0) for start in (0, 1)]
        encoding = "utf-8"
        if max(zeros) > len(content[:2000]) / 5:
            encoding = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    name = encoding.upper()
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        # in another encoding, hardly any characters look like those of UTF-8
        if not content.decode("utf-8", "ignore").isascii():
            raise ValueError(
                f"{path} is UTF-8 with lines of another encoding, or damaged; save it as UTF-8"
            ) from None
        # Western programs of Windows; a few bytes have no character there
        name = "Windows-1252 instead of UTF-8"
        try:
            text = content.decode("cp1252")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text: {error}; save it as UTF-8") from None
        words = {word for word in re.split(r"[\s,;|/\"]+", text) if not word.isascii()}
        misread = sorted(word for word in words if _MISREAD.search(word))
        if len(misread) > len(words) / 2:
            raise ValueError(
                f"{path} is in an unknown encoding ({shorten(misread[0], 30)!r} as Windows-1252)"
                "; save it as UTF-8 (in Excel: CSV UTF-8)"
            ) from None
    if "\0" in text:
        raise ValueError(f"{path} is not a text: it holds zero bytes; save it as UTF-8")
    return text, [] if name.startswith("UTF-8") else [f"text in {name}"]


def _split_rows(path: Path, text: str) -> tuple[list[Row], str]:
    """Split a text into rows and fields.

    Returns:
        The rows that aren't blank, and the delimiter; "" for spaces.
    """
    lines = text.split("\n", _SAMPLE)
    # Excel's own line about the delimiter
    match = re.fullmatch(r'"?sep=(.)"?', lines[0].strip(_INVISIBLE))
    if match:
        return _parse(path, text.partition("\n")[2], match[1], first=2), match[1]

    sample = "\n".join(lines[:_SAMPLE])
    best, best_score = "", (0, 0.0, 0)
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
    rows = _parse(path, text, best or ",")
    if best:
        return rows, best

    # R's write.table
    if text.lstrip().startswith('"') and '" "' in lines[0]:
        return _parse(path, text, " "), ""
    # some programs put whole lines into quotes
    cells = [fields[0] for _, fields in rows if len(fields) == 1]
    if len(cells) == len(rows) and any("," in cell for cell in cells):
        split = (next(csv.reader([cell]), []) for cell in cells)
        return [(line, fields) for (line, _), fields in zip(rows, split, strict=True)], ","
    # "images/a b.jpg 3", as lists of image files are written
    if path.suffix.lower() == ".txt":
        parts = [(line, fields[0].rsplit(None, 1)) for line, fields in rows]
        if parts and all(len(fields) == 2 for _, fields in parts):
            return parts, ""
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
            # a blank line, or a ruler such as "---|---"
            if any(re.search(r"\w", field) for field in fields):
                rows.append((reader.line_num + first - 1, fields))
    except csv.Error as error:
        if not is_sample:
            place = f"{path} line {reader.line_num + first - 1}"
            raise ValueError(f"{place} is not a row of a CSV table: {error}; correct it") from error
    return rows


def _strip(rows: Sequence[Row], guesses: list[str]) -> list[Row]:
    """Remove spaces around values, and say how many had some."""
    stripped: list[Row] = []
    num_spaces = 0
    for line, fields in rows:
        values = [field.strip().strip(_INVISIBLE).strip() for field in fields]
        num_spaces += sum(a != b for a, b in zip(fields, values, strict=True))
        stripped.append((line, values))
    if num_spaces:
        guesses.append(f"spaces around {num_spaces:,} values removed")
    return stripped


def _find_header(rows: Sequence[Row]) -> int | None:
    """Find the row with the names of the columns; None if there is none."""
    # a title or a comment may stand above it
    for index, (_, fields) in enumerate(rows[:_HEADER_ROWS]):
        if count_known(fields) >= 2:
            return index
    if not rows or any(map(is_image_name, rows[0][1])):
        return None
    return 0


def _read_json_lines(path: Path, text: str, guesses: list[str]) -> Table:
    objects: dict[int, dict[str, Any]] = {}
    # not splitlines, which also cuts at characters that JSON holds as they are, such as U+2028
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        objects[number] = parse_json(line, origin=f"{path} line {number}")
        if not isinstance(objects[number], dict):
            raise ValueError(f"{path} line {number} is not a JSON object: {shorten(line)}")
    columns = list(dict.fromkeys(name for each in objects.values() for name in each))
    rows: list[Row] = []
    num_spaces = 0
    for number, each in objects.items():
        fields = [each.get(column) for column in columns]
        stripped = [field.strip() if isinstance(field, str) else field for field in fields]
        num_spaces += fields != stripped
        rows.append((number, stripped))
    if num_spaces:
        guesses.append(f"spaces around values of {num_spaces:,} rows removed")
    return Table(path, columns, len(columns), rows, guesses)
