"""Receive photos: in time, within bounds, without opening a name that a client gives."""

import asyncio
from collections.abc import AsyncGenerator
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from fastapi import Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

MAX_BYTES = 20 * 2**20
# photos and other fields of a form
_MAX_PHOTOS = 100
# to receive a request
RECEIVING_SECONDS = 60.0
# it may fall so far behind this rate, in bytes a second
_SLOW_SECONDS = 5.0
_MIN_RATE = 64 * 2**10 / 5
# so far behind, it may lose its place to another request
_PROTECTED_SECONDS = 1.0
# bytes of a photo in memory; a larger one is in a temporary file
_SPOOL_BYTES = 2**20
HINT = (
    "send photos as a form, curl -F image=@photo.jpg http://…/predict, or one as the body, with its"
    " type, such as image/jpeg"
)


# the limits of time of the requests that are being received
Uploads = set[asyncio.Timeout]


def end_slowest(uploads: Uploads) -> bool:
    """End the slowest upload, which frees its place; return false if none is slow enough."""
    slowest = min(uploads, key=lambda limit: limit.when() or 0, default=None)
    now = asyncio.get_running_loop().time()
    if slowest is None or (slowest.when() or 0) > now + _SLOW_SECONDS - _PROTECTED_SECONDS:
        return False
    uploads.discard(slowest)
    slowest.reschedule(now)
    return True


async def receive_photos(request: Request, uploads: Uploads) -> list[BinaryIO]:
    """Receive the photos of a form, or the one that is the body; their names are never used.

    Args:
        request: The request.
        uploads: This request's limit is among them while it is received.

    Raises:
        HTTPException: The request has no photo, too many, or is over a limit.
    """
    # a browser names the site that asks; programs send no such header
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        text = "the page of another site may not use this model; a proxy can give both one address"
        raise HTTPException(403, text)
    kind = request.headers.get("content-type", "").lower()
    if not kind.startswith(("multipart/form-data", "image/")):
        raise HTTPException(415, HINT)
    # before anything is received
    if int(request.headers.get("content-length", 0)) > MAX_BYTES:
        raise _refuse_size()

    try:
        async with asyncio.timeout(_SLOW_SECONDS) as limit:
            uploads.add(limit)
            try:
                chunks = _read_chunks(request, limit, uploads)
                if kind.startswith("image/"):
                    return [await _receive_body(chunks)]
                return await _receive_form(request, chunks)
            finally:
                uploads.discard(limit)
    except TimeoutError:
        text = f"the photo arrived too slowly; it must arrive within {RECEIVING_SECONDS:.0f} s, and"
        raise HTTPException(408, f"{text} at {_MIN_RATE / 2**10:.0f} KB/s or more") from None
    except (MultiPartException, FormParserError, ClientDisconnect) as error:
        text = f"the form is damaged, or has more than {_MAX_PHOTOS} photos or fields"
        raise HTTPException(400, f"{text}; {HINT}") from error


async def _receive_body(chunks: AsyncGenerator[bytes, None]) -> BinaryIO:
    file = cast(BinaryIO, SpooledTemporaryFile(_SPOOL_BYTES))  # noqa: SIM115
    try:
        async for chunk in chunks:
            file.write(chunk)
    except BaseException:
        file.close()
        raise
    return file


async def _receive_form(request: Request, chunks: AsyncGenerator[bytes, None]) -> list[BinaryIO]:
    parser = MultiPartParser(request.headers, chunks, max_files=_MAX_PHOTOS, max_fields=_MAX_PHOTOS)
    form = await parser.parse()
    photos = [value.file for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not photos:
        raise HTTPException(400, f"the form has no file; {HINT}")
    return list(photos)


async def _read_chunks(
    request: Request, limit: asyncio.Timeout, uploads: Uploads
) -> AsyncGenerator[bytes, None]:
    start = asyncio.get_running_loop().time()
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        # a request in chunks doesn't say its size, and one that does may lie
        if num_bytes > MAX_BYTES:
            raise _refuse_size()
        # one whose place was taken stays ended
        if limit in uploads:
            seconds = min(_SLOW_SECONDS + num_bytes / _MIN_RATE, RECEIVING_SECONDS)
            limit.reschedule(start + seconds)
        yield chunk


async def wait_until_gone(request: Request) -> None:
    """Wait until the client of a request that was received closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse_size() -> HTTPException:
    return HTTPException(413, f"the upload is larger than {MAX_BYTES / 2**20:.0f} MB")
