"""What a reader has to hold in mind, measured: `python tests/readability.py [FOLDER …]`, by default vit.

Lines alone say little, since joining them makes them fewer and harder to read. Characters of code leave
out docstrings, comments and blank lines.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

# name of a measure → the most that the package may have, per 1,000 lines of code
MAX_PER_1000_LINES = {
    "lines over 100 columns": 15.0,
    "a, b = x, y": 5.0,
    "x if y else z": 18.0,
    "** calls": 3.0,
    "local dict[str, Any]": 0.0,
}
MIN_COMMENT_LINES_PER_1000 = 40.0
MAX_CHARACTERS_A_LINE = 42.0
# of code in the package; it came to 528,000 when the layout was made, and grows with what is new:
# prediction sets, p-values and the audit of labels take 35,000, targets of maps beyond one class
# 5,000, groups of patches and the probe of pretrained weights 15,000; 70,000 are for folds, nearest
# images, summaries of what a class looks at, and more models that maps read; 15,000 for attention
# sinks, a third operator of the faithfulness benchmark, and code that exports carry with them; 8,000
# for groups of images and copies that splits don't part; 14,000 for what tokens are like, the effects
# of heads, and maps of models without attention; 3,000 for the checks of those maps; 2,000 for marks
# that share a cluster with the object; 5,000 for the nearest training photos on pages;
# 14,000 for the learning curve of a probe and its forecast; 12,000 for training on the tokens of
# frozen blocks, runs that end within their minutes, and more forms of weights; 2,000 for a stem with
# convolutions at each size, images without colours, and what the first run on a GPU showed
MAX_CHARACTERS = 841_000


def measure_file(path: Path) -> Counter[str]:
    """The counts of one Python file, by the name of the measure."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    nodes = list(ast.walk(ast.parse(text)))

    docstring_lines: set[int] = set()
    for node in nodes:
        if _has_docstring(node):
            docstring = node.body[0]
            docstring_lines |= set(range(docstring.lineno, docstring.end_lineno + 1))

    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    comment_lines = {n for n in comments if lines[n - 1].lstrip().startswith("#")}
    code_lines = [
        line
        for number, line in enumerate(lines, start=1)
        if line.strip() and number not in docstring_lines and number not in comment_lines
    ]
    return Counter(
        {
            "code lines": len(code_lines),
            "characters of code": sum(len(line.strip()) for line in code_lines),
            "lines over 100 columns": sum(len(line) > 100 for line in lines),
            "comment lines": len(comment_lines),
            "a, b = x, y": sum(map(_assigns_several, nodes)),
            "x if y else z": sum(isinstance(node, ast.IfExp) for node in nodes),
            "local dict[str, Any]": sum(map(_is_dict_of_any, nodes)),
            "** calls": sum(map(_unpacks_keywords, nodes)),
        }
    )


def _has_docstring(node: ast.AST) -> bool:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None


def _assigns_several(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _is_dict_of_any(node: ast.AST) -> bool:
    if not isinstance(node, ast.AnnAssign):
        return False
    return ast.unparse(node.annotation).replace(" ", "") == "dict[str,Any]"


def _unpacks_keywords(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)


def measure(folder: Path) -> Counter[str]:
    """The sums of all Python files below `folder`, or of the one file."""
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    return sum(map(measure_file, paths), Counter())


def main() -> None:
    for name in sys.argv[1:] or ["vit"]:
        counts = measure(Path(name))
        num_lines = max(counts["code lines"], 1)
        print(name)
        for measure_name, count in counts.items():
            print(f"  {measure_name:24} {count:9,} {1000 * count / num_lines:9.1f} per 1,000 lines")
        characters = counts["characters of code"] / num_lines
        print(f"  {'characters a line':24} {characters:9.1f}")


if __name__ == "__main__":
    main()
