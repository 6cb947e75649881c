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
            own parameters; or with a result that is saved and its directory. Its docstring is the
            help.
        function: Name of the public function, such as "audit" for `vit.audit`.
        is_saved: The function returns a `Result`, which is saved for the command.
        python_only: Parameters of the function that have no option.
        kinds: Parameter → type that its text is read as, if the annotation doesn't say it.
        flags: Parameter → its option, such as "--class", or the name of its argument.
    """

    run: Callable[..., None]
    function: str = ""
    is_saved: bool = False
    python_only: Collection[str] = ("dataset", "class_names")
    kinds: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
