"""Hugging Face's hub, where it can't be reached."""

from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub as hub


@contextmanager
def without_retries() -> Iterator[None]:
    """Where the hub can't be reached, only what was downloaded before: it would be asked again for minutes."""
    before = hub.constants.HF_HUB_OFFLINE
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
    except Exception:  # of whichever library it sends its requests with
        hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.constants.HF_HUB_OFFLINE = before
