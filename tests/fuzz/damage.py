"""Ways to damage bytes and values, and what a user's mistake may end in."""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Forbidden(BaseException):
    """A case took too long or started a program; no handler of errors catches this."""


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, removed, repeated or replaced, at one to eight places."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        length = min(rng.choice((1, 2, 4, 16, 256, 4096)), max(len(data) - place, 1))
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place : place + length] = rng.randbytes(length)
        elif kind == 2:
            data[place : place + length] = rng.choice((b"\0", b"\xff", b"\x7f", b"9")) * length
        elif kind == 3:
            del data[place : place + length]
        elif kind == 4:
            data[place:place] = data[place : place + length] * rng.choice((1, 2, 50))
        else:
            del data[place:]
    return bytes(data)


def run_command(*arguments: object, may_fail: bool = False) -> str | None:
    """The command inside this process: its output where it succeeds, None where it refuses in one
    line. `may_fail`: exit code 1 counts as success, as of `vit predict` where no image is readable.
    """
    from tests.conftest import Launcher

    outcome = Launcher().run(*arguments)
    if outcome.code == 2:
        assert len(outcome.err.splitlines()) == 1, outcome.err
        assert outcome.err.startswith("vit: error: "), outcome.err
        assert len(outcome.err) < 3000
        assert " at 0x" not in outcome.err, outcome.err
        return None
    allowed = (0, 1) if may_fail else (0,)
    assert outcome.code in allowed, f"exit code {outcome.code}: {outcome.err}"
    return outcome.out


def damage_text(path: Path, rng: random.Random) -> None:
    """Change bytes or, of JSON, values."""
    if path.suffix == ".json" and rng.random() < 0.5:
        values = json.loads(path.read_text())
        change_value(values, rng)
        path.write_text(json.dumps(values))
    else:
        path.write_bytes(mutate(path.read_bytes(), rng))


OVERRIDES = [
    "train.seed=!!timestamp x",
    "train.seed=" + "[" * 5000,
    "x=*a",
    "data.std=[0,0,0]",
    "model.patch_size=0",
]


def change_value(values: Any, rng: random.Random) -> None:
    """Put another value in one place of nested lists and dictionaries."""
    places: list[tuple[Any, Any]] = []
    unread = [values]
    while unread:
        value = unread.pop()
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        places += [(value, key) for key in keys]
        unread += [value[key] for key in keys if isinstance(value[key], dict | list)]
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("[/]", "", "x" * 1000, "pool", "seed"))] = draw_value(rng)
    else:
        holder[key] = draw_value(rng)


def draw_value(rng: random.Random) -> Any:
    plain = [
        None,
        True,
        0,
        -1,
        1,
        10**9,
        2**63,
        10**30,
        0.0,
        1e-320,
        1e308,
        math.nan,
        math.inf,
        "",
        "x",
        "x" * 3000,
    ]
    value = rng.choice(
        [*plain, "[/]", "\x1b[2J", "\ud800", [], {}, [1], [1, 1], [0, 0, 0], {"name": 3}, [[[[]]]]]
    )
    return json.loads(json.dumps(value))  # a copy


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What a user's mistake may raise, in one sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        if " at 0x" in str(error):
            raise Forbidden(f"an address in a message: {error}") from error
