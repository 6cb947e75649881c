"""Pooled features of images, to look for neighbours or clusters, or to train another classifier."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.data.dataset import printable
from vit.runtime.files import save_arrays, write_atomically


def save_embeddings(
    path: Path, names: Sequence[str], features: Sequence[NDArray[np.float32]]
) -> None:
    """Write features: .npz with `paths` [N] and `embeddings` [N, D], or .parquet with the columns
    path and embedding."""
    paths = [printable(name) for name in names]

    def write(temporary: Path) -> None:
        if path.suffix == ".npz":
            arrays = {"paths": np.array(paths, dtype=str), "embeddings": np.array(features)}
            save_arrays(temporary, arrays)
            return
        # pyarrow comes with the extra "datasets"
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        pq.write_table(pa.table({"path": paths, "embedding": features}), temporary)

    write_atomically(path, write)


def check_embeddings_file(path: Path) -> None:
    """Check the file that features go into, before they are computed.

    Raises:
        ValueError: The suffix is neither .npz nor .parquet, or pyarrow is missing for the latter.
    """
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"--embeddings {path} ends neither in .npz nor in .parquet")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            "--embeddings FILE.parquet needs pyarrow: pip install 'vit-pipeline[datasets]';"
            " .npz needs nothing"
        )
