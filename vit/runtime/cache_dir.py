"""Where downloads and decoded images are kept."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$VIT_CACHE, or ~/.cache/vit."""
    return Path(os.environ.get("VIT_CACHE") or Path.home() / ".cache" / "vit")
