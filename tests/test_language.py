"""Comments and docstrings are sentences or names: none begins as a fragment does."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Words that begin a fragment ("Of each image the share …"), and seldom a sentence or a name.
FRAGMENT = re.compile(
    r"(of|as of|that|what|whether|in which|by which|with which|for which|those|in place of|beside)\b",
    re.IGNORECASE,
)
AS_OF = re.compile(r"\bas of\b", re.IGNORECASE)
ARGUMENT = re.compile(r"\s+[\w, *]+: (.*)")
# Names such as "what: The thing that is shown." may look like fragments; there are few.
MAX_FRAGMENTS = 45


def list_comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments with their line numbers."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ").strip()


def list_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings with the line numbers at which they begin."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring


def find_fragments(text: str) -> Iterator[tuple[int, str]]:
    """Lines of comments and docstrings that begin as a fragment does, or say "as of"."""
    previous = -1
    for line, comment in list_comments(text):
        is_first = line != previous + 1
        previous = line
        if (is_first and FRAGMENT.match(comment)) or AS_OF.search(comment):
            yield line, comment

    for line, docstring in list_docstrings(text):
        rows = docstring.split("\n")
        if FRAGMENT.match(docstring):
            yield line, rows[0]
        for offset, row in enumerate(rows):
            entry = ARGUMENT.match(row)
            if (entry and FRAGMENT.match(entry[1])) or (offset and AS_OF.search(row)):
                yield line + offset, row.strip()


def test_comments_and_docstrings_are_sentences() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "vit").rglob("*.py"))
        for line, text in find_fragments(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_FRAGMENTS, "\n".join(found)


def test_fragments_are_found() -> None:
    text = '''# Of each image.
x = 1  # a number, as of now
def f(a):
    """Return one.

    Args:
        a: What it is.
    """
'''
    assert [line for line, _ in find_fragments(text)] == [1, 2, 7]
