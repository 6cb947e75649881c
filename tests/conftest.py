"""Shared by all tests: shapes in signatures are checked while they run, and nothing takes more than its core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

# before any module below is imported: each annotated call then checks its array shapes
install_import_hook(
    [
        "vit.model",
        "vit.explanation",
        "vit.data.random",
        "vit.data.kernels",
        "vit.data.loaders",
        "vit.data.policies",
    ],
    "beartype.beartype",
)
