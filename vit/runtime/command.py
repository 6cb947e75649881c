"""Record of a command of the command line."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# The public function of a command, with the values of its options.
Call = partial[Any]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the command line. `vit.cli.build` describes how it is made.

    Attributes:
        run: Called with a `Call` of the public function, if there is one, and the values of its
            own parameters. Its docstring is the help.
        function: Name of the public function, such as "audit" for `vit.audit`.
        python_only: Parameters of the function that have no option.
        flags: Parameter → its option, such as "--class", or the name of its argument.
    """

    run: Callable[..., None]
    function: str = ""
    python_only: Collection[str] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
