"""Receive the photo of a request, within the limits of size and time."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

MAX_BYTES = 20 * 2**20
# to receive a photo
SECONDS = 60.0
HINT = "send one photo as a form: curl -F image=@photo.jpg http://…/predict"


async def receive_photo(request: Request) -> UploadFile:
    """Receive the photo of a form; its name is never used.

    Raises:
        HTTPException: The request has no photo, more than one, or is over a limit.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HTTPException(403, "the page of another site may not use this model")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, HINT)
    if int(request.headers.get("content-length", 0)) > MAX_BYTES:
        raise _refuse_size()

    parser = MultiPartParser(request.headers, _read_chunks(request), max_files=1, max_fields=1)
    try:
        async with asyncio.timeout(SECONDS):
            form = await parser.parse()
    except TimeoutError:
        raise HTTPException(408, f"the photo took more than {SECONDS:.0f} s to arrive") from None
    except (MultiPartException, ClientDisconnect) as error:
        raise HTTPException(
            400, f"the form is damaged or holds more than a photo; {HINT}"
        ) from error

    uploads = [value for value in form.values() if isinstance(value, UploadFile)]
    if uploads and uploads[0].size:
        return uploads[0]
    await form.close()
    problem = "the photo is empty" if uploads else "the form has no file"
    raise HTTPException(400, f"{problem}; {HINT}")


async def _read_chunks(request: Request) -> AsyncGenerator[bytes, None]:
    # a request in chunks doesn't say its size, and one that does may lie
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BYTES:
            raise _refuse_size()
        yield chunk


def _refuse_size() -> HTTPException:
    return HTTPException(413, f"the upload is larger than {MAX_BYTES / 2**20:.0f} MB")
