"""Record of a command of the command line."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the command line. `vit.cli.build` describes how it is made.

    Attributes:
        run: Called with the values of its own parameters. Before them it gets the public function,
            if there is one, with the values of that function's parameters filled in. Its docstring
            is the help.
        function: Name of the public function, such as "audit" for `vit.audit`.
        python_only: Parameters of the function that have no option.
        flags: Parameter → its option, such as "--class", or the name of its argument.
        help: Parameter → a text that is shorter than its first sentence under `Args:`.
        rare: Parameters that share the option --option NAME=VALUE.
        alias: Another name of the command, which the list of commands doesn't show.
        old_flags: Earlier name of an option, which still works and isn't listed → its name.
        rare_into: Parameter, a dictionary, that gets the values of --option with other names.
        sections: Function that returns more sections of the help, when it is shown: title → rows
            of a name and a text.
    """

    run: Callable[..., None]
    function: str = ""
    python_only: Collection[str] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    help: Mapping[str, str] = field(default_factory=dict)
    rare: Collection[str] = ()
    old_flags: Mapping[str, str] = field(default_factory=dict)
    alias: str = ""
    rare_into: str = ""
    sections: Callable[[], Mapping[str, Sequence[tuple[str, str]]]] = dict


# the function of a command, with the values of its options
Call = partial[Any]
