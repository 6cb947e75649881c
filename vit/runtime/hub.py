"""Work without Hugging Face's hub where it can't be reached."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Use only earlier downloads if the hub can't be reached.

    The hub's library would try to reach it for minutes.
    """
    from huggingface_hub import constants, get_session  # takes a second to import

    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        # The class depends on the library that sends the requests.
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
