"""Work without Hugging Face's hub where it can't be reached."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from vit.runtime.arguments import shorten

# Seconds in which the hub must answer. Its library would try for minutes.
_WAIT = 5
_WEIGHTS = "model.safetensors"
# A process of its own ends when its time is over, whatever the library waits for.
_DOWNLOAD = "import sys, huggingface_hub as hub; hub.hf_hub_download(*sys.argv[1:])"


@contextmanager
def offline_if_unreachable(repository: str | None = None) -> Iterator[None]:
    """Use only earlier downloads if the hub can't be reached, or if they have the weights of a
    repository."""
    from huggingface_hub import constants  # takes a second to import

    before = constants.HF_HUB_OFFLINE
    if (repository and has_weights(repository)) or not _is_reachable():
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def has_weights(repository: str) -> bool:
    """Return whether the weights of a repository of the hub were downloaded earlier."""
    from huggingface_hub import try_to_load_from_cache  # takes a second to import

    return isinstance(try_to_load_from_cache(repository, _WEIGHTS), str)


def download_weights(repository: str, *, seconds: float) -> None:
    """Download the weights of a repository of the hub. Raises OSError, whose sentence says why, if
    that isn't done within this time."""
    from huggingface_hub import constants  # takes a second to import

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    if not _is_reachable():
        raise OSError(f"{constants.ENDPOINT} does not answer within {_WAIT} s")
    command = [sys.executable, "-c", _DOWNLOAD, repository, _WEIGHTS]
    try:
        subprocess.run(command, timeout=seconds, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise OSError(
            f"the download took over {seconds:.0f} s; hf download {repository} finishes it"
        ) from None
    except subprocess.CalledProcessError as error:
        raise OSError(shorten(error.stderr.strip().rpartition("\n")[2])) from error


def _is_reachable() -> bool:
    """Return whether the hub answers."""
    from huggingface_hub import constants, get_session  # takes a second to import

    answers = []

    def ask() -> None:
        # The class of an error depends on the library that sends the requests.
        with suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=_WAIT))

    # The library's own limit doesn't count the look-up of the address.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT)
    return bool(answers)
