"""Every notebook executes from top to bottom, and is stored with the outputs of such a run."""

from pathlib import Path

import nbformat
import pytest
from execute_notebooks import NOTEBOOKS, execute

pytestmark = pytest.mark.docs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Jupyter's kernel client leaves its sockets to the garbage collector
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_notebook_executes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    stored = nbformat.read(path, as_version=4)
    executed = execute(path, folder=tmp_path)
    for before, after in zip(stored.cells, executed.cells, strict=True):
        if before.cell_type == "code":
            kinds = [[output.output_type for output in cell.outputs] for cell in (before, after)]
            assert kinds[0] == kinds[1], "store the outputs of this notebook with `make notebooks`"
