"""The parameters of a command are those of its options record."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from vit.cli.parameters import build_command
from vit.options import Option


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Of a method.

    Args:
        weight: of it
    """

    weight: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Base:
    """What several records have.

    Args:
        place: one or the other
    """

    place: int | str = "auto"


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """How.

    Args:
        names: several names,
            with commas between them
        count: how many
        inner: of the method
    """

    names: Annotated[tuple[str, ...], Option(flag="--name")] = ("a", "b")
    count: Annotated[int, Option(min=1)] = 3
    inner: Inner = Inner()


def run(*arguments: str) -> Any:
    """The record that a command gets; or the error."""
    received: list[Any] = []

    def command(model: str, *, options: Options) -> None:
        """Do it.

        Args:
            model: of the file
        """
        received.extend([model, options])

    app = typer.Typer()
    app.command()(build_command(command))
    result = CliRunner().invoke(app, ["model", *arguments])
    return received[1] if received else result


def test_the_help_is_that_of_the_docstrings() -> None:
    text = " ".join(run("--help").output.replace("│", " ").split())
    for help_text in (
        "Do it. ╭",
        "of the file",
        "several names, with commas between them",
        "one or the other",
        "may be repeated: weight (of it)",
    ):
        assert help_text in text


def test_without_options_the_record_has_its_defaults() -> None:
    assert run() == Options()


def test_every_kind_of_field_is_read() -> None:
    arguments = ["--name", "c, d", "--place", "here", "--count", "2"]
    assert run(*arguments, "--option", "weight=0.25") == Options(
        names=("c", "d"), place="here", count=2, inner=Inner(weight=0.25)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--option", "wait=1"), "--option 'wait=1' is not NAME=VALUE with one of weight"),
        (("--option", "weight=much"), "weight 'much': input should be a valid number"),
    ],
)
def test_a_wrong_rare_option_is_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    assert message in str(run(*arguments).exception)


def test_a_number_below_its_minimum_is_refused() -> None:
    assert run("--count", "0").exit_code == 2
