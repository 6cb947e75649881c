"""Work without Hugging Face's hub where it can't be reached."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

# Seconds in which the hub must answer. Its library would try for minutes.
WAIT = 5
# File of a repository of weights.
WEIGHTS = "model.safetensors"


@contextmanager
def offline_if_unreachable(repository: str | None = None) -> Iterator[None]:
    """Use only earlier downloads if the hub can't be reached, or if they have the weights of a
    repository."""
    from huggingface_hub import constants  # takes a second to import

    before = constants.HF_HUB_OFFLINE
    if (repository and has_weights(repository)) or not is_reachable():
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def has_weights(repository: str) -> bool:
    """Return whether the weights of a repository of the hub were downloaded earlier."""
    from huggingface_hub import try_to_load_from_cache  # takes a second to import

    return isinstance(try_to_load_from_cache(repository, WEIGHTS), str)


def is_reachable() -> bool:
    """Return whether the hub answers."""
    from huggingface_hub import constants, get_session  # takes a second to import

    answers = []

    def ask() -> None:
        # The class of an error depends on the library that sends the requests.
        with suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=WAIT))

    # The library's own limit doesn't count the look-up of the address.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WAIT)
    return bool(answers)
