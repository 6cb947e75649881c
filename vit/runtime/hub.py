"""Hugging Face's hub, where it can't be reached."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_session


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Use only what was downloaded before, where the hub can't be reached.

    Its library would try to reach it for minutes.
    """
    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        # of whichever library it sends its requests with
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
