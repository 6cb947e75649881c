"""Record of a command of the command line."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any


class Call(partial[Any]):
    """The public function of a command, with the values of its options.

    Attributes:
        given: Parameter → option, for the options that the user gave.
    """

    given: Mapping[str, str] = {}

    def refuse(self, names: Collection[str], reason: str) -> None:
        """Raise ValueError if the user gave an option that isn't used.

        Args:
            names: Parameters that aren't used.
            reason: End of the sentence, such as "has no effect with IMAGES".
        """
        unused = [option for name, option in self.given.items() if name in names]
        if unused:
            raise ValueError(f"{', '.join(unused)} {reason}; leave it out")


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
