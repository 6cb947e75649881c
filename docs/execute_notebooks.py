"""Execute the notebooks and store their outputs; large pictures are stored as JPEG.

python docs/execute_notebooks.py
"""

import base64
import io
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_PNG = 40_000  # characters; line plots have fewer, and stay sharp


def execute(path: Path) -> NotebookNode:
    """Return the notebook with the outputs of a run from top to bottom, in its own folder."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook, timeout=600, resources=resources, record_timing=False, coalesce_streams=True
    )
    client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            compress(output.get("data", {}))
    del notebook.metadata["language_info"]  # the machine's Python version
    return notebook


def compress(data: dict[str, str]) -> None:
    """Replace a large PNG picture of an output by JPEG."""
    if len(data.get("image/png", "")) > MAX_PNG:
        with Image.open(io.BytesIO(base64.b64decode(data.pop("image/png")))) as picture:
            file = io.BytesIO()
            picture.convert("RGB").save(file, "JPEG", quality=75)
        data["image/jpeg"] = base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)
