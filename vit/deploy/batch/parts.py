"""A Parquet table with a row for each image, written in parts into a folder or object storage.

A part is written whole or not at all. Its name is a hash of its images: written again, it replaces
itself. A job that is started again reads which images have a row.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from vit.data.sources.remote import is_remote
from vit.runtime.files import expand_home, remove_temporaries, write_atomically

# key in the metadata of a part
_FACTS = b"vit"


class Parts:
    """The parts of a table.

    Args:
        output: Folder, or an address such as s3://bucket/predictions.
        facts: Values that all rows have in common: the model and the options.
    """

    def __init__(self, output: str | Path, facts: Mapping[str, Any]) -> None:
        self.output = output if is_remote(output) else expand_home(output).absolute()
        self.facts = json.dumps(facts, sort_keys=True).encode()
        self.filesystem, self.folder = fsspec.url_to_fs(str(self.output).rstrip("/"))

    def prepare(self, *, resume: bool) -> pa.ChunkedArray:
        """Make the folder, and return the paths of the images that have a row.

        Raises:
            FileExistsError: There are parts, and `resume` is not set.
            ValueError: They are of another model or other options.
        """
        files = self.filesystem.glob(f"{self.folder}/*.parquet")
        if files and not resume:
            text = "choose another --output, or go on with --resume"
            raise FileExistsError(f"{self.output} already holds files; {text}")
        if isinstance(self.output, Path):
            self.output.mkdir(parents=True, exist_ok=True)
            remove_temporaries(self.output)
        # object storage answers many requests at once
        with ThreadPoolExecutor(32) as pool:
            return pa.chunked_array(pool.map(self._read_paths, files), pa.large_string())

    def _read_paths(self, file: str) -> pa.Array:
        with self.filesystem.open(file) as opened:
            part = pq.read_table(opened, columns=["path"])
        if (part.schema.metadata or {}).get(_FACTS) != self.facts:
            text = "was written with another model or other options"
            raise ValueError(f"{self.output} {text}; give the same, or another --output")
        return part["path"].cast(pa.large_string()).combine_chunks()

    def write(self, rows: pa.Table) -> None:
        """Write a part."""
        paths = "\n".join(rows["path"].to_pylist())
        name = f"part-{hashlib.sha256(paths.encode()).hexdigest()[:20]}.parquet"
        rows = rows.replace_schema_metadata({_FACTS: self.facts})
        if isinstance(self.output, Path):
            write_atomically(self.output / name, lambda path: pq.write_table(rows, path))
        else:
            content = io.BytesIO()
            pq.write_table(rows, content)
            # a store has whole files only
            self.filesystem.pipe_file(f"{self.folder}/{name}", content.getvalue())
