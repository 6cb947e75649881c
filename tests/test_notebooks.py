"""Every notebook executes from top to bottom, and is stored with the outputs of such a run."""

import re
from pathlib import Path

import nbformat
import pytest
from execute_notebooks import NOTEBOOKS, execute
from nbformat import NotebookNode

pytestmark = pytest.mark.docs

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def read_text(cell: NotebookNode) -> str:
    """Join what a cell prints."""
    return "".join(output.get("text", "") for output in cell.outputs)


def read_numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def test_notebooks_are_small() -> None:
    for path in NOTEBOOKS:
        assert path.stat().st_size < 900 * 1024, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Jupyter's kernel client leaves its sockets to the garbage collector
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_notebook_executes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    stored = nbformat.read(path, as_version=4)
    executed = execute(path)
    for before, after in zip(stored.cells, executed.cells, strict=True):
        if before.cell_type != "code":
            continue
        kinds = [[output.output_type for output in cell.outputs] for cell in (before, after)]
        assert kinds[0] == kinds[1], "store the outputs of this notebook with `make notebooks`"
        # Jupyter shows warnings in red
        assert not [output.text for output in after.outputs if output.get("name") == "stderr"]

        # Training differs between machines. Everything else prints the same words, and nearly the
        # same numbers.
        if "varies" not in before.metadata.get("tags", []):
            texts = [read_text(cell) for cell in (before, after)]
            assert NUMBER.sub("N", texts[0]) == NUMBER.sub("N", texts[1])
            assert read_numbers(texts[1]) == pytest.approx(
                read_numbers(texts[0]), rel=0.1, abs=0.02
            )
