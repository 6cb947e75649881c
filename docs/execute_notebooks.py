"""Execute the notebooks and store their outputs, without what is written to standard error.

python docs/execute_notebooks.py
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def execute(path: Path, *, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run from top to bottom, in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=300, resources=resources, record_timing=False, coalesce_streams=True
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    del notebook.metadata["language_info"]  # the machine's Python version
    return notebook


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            nbformat.write(execute(path, folder=Path(folder)), path)
        print(path.name)
