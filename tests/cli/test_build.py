"""A command is built from the public function's signature and its `Args:`."""

import re
import subprocess
import sys
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import pytest
from typer.main import get_command

import vit
from tests.conftest import Launcher
from vit.cli.build import CommandBuilder
from vit.cli.main import COMMANDS, app
from vit.runtime.arguments import accept_old_names, check_arguments
from vit.runtime.command import Command
from vit.runtime.signatures import REQUIRED, Names, read_signature

ALL: dict[str, Command] = {
    reference: import_module(reference).COMMAND
    for reference in COMMANDS
    if isinstance(reference, str)
}


@pytest.mark.parametrize("command", ALL.values(), ids=ALL)
def test_every_parameter_of_the_function_is_an_option_or_for_python_only(command: Command) -> None:
    if not command.function:
        return
    parameters = signature(getattr(vit, command.function)).parameters
    builder = CommandBuilder(command)
    others = {*command.python_only, command.rare_into}
    assert builder.passed.keys() | builder.rare.keys() | others >= parameters.keys()
    for name, read in (builder.passed | builder.rare).items():
        default = parameters[name].default
        assert read.default is REQUIRED if default is Parameter.empty else read.default == default
        assert read.is_keyword == (parameters[name].kind is Parameter.KEYWORD_ONLY)
        assert read.help or name in builder.own, f"{name} has no text under Args:"


@pytest.mark.parametrize("command", ALL.values(), ids=ALL)
def test_the_table_of_a_command_names_its_parameters(command: Command) -> None:
    builder = CommandBuilder(command)
    known = builder.own.keys() | builder.passed.keys() | builder.rare.keys()
    assert set(command.flags) | set(command.help) <= known
    assert set(command.rare) == builder.rare.keys()
    if command.function:
        assert (
            set(command.python_only) <= signature(getattr(vit, command.function)).parameters.keys()
        )
    for name, parameter in builder.own.items():
        assert parameter.help, f"{name} has no text under Args:"


@pytest.mark.parametrize("reference", ["", *ALL])
def test_the_help_is_read_at_80_columns(
    reference: str, cli: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [ALL[reference].run.__name__] if reference else []
    text = cli.succeed(*words, "--help").out
    assert max(map(len, text.splitlines())) <= 80
    # a name is not broken after its hyphen, and no text is cut off
    assert not re.search(r"\w-$|\.\.\.$", text.replace("...\n\n", "\n"), flags=re.MULTILINE)
    assert "`" not in text


def test_the_help_of_every_command_does_without_torch() -> None:
    code = (
        "import sys\nfrom vit.cli.main import app, COMMANDS\nfrom typer.testing import CliRunner\n"
        f"for name in {[command.name for command in app.registered_commands]}:\n"
        "    assert CliRunner().invoke(app, [name, '--help']).exit_code == 0, name\n"
        "slow = {'torch', 'numpy', 'PIL', 'yaml'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_text_is_that_of_the_function_it_refers_to() -> None:
    audit = read_signature("vit.analysis.audit.run", "audit")
    evaluate = CommandBuilder(ALL["vit.cli.evaluate"]).passed
    for name in ("batch_size", "device", "precision"):
        assert audit[name].help == evaluate[name].help


def test_what_a_signature_says_of_the_command_line() -> None:
    explain = CommandBuilder(ALL["vit.cli.explain"])
    assert explain.passed["methods"].kind == Names
    assert explain.passed["batch_size"].kind is int
    assert explain.passed["batch_size"].bounds == (1, None)
    assert explain.passed["target"].kind is str
    compare = CommandBuilder(ALL["vit.analysis.compare.command"])
    assert compare.own["num_examples"].bounds == (0, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--option", "wait"), "--option 'wait' is not NAME=VALUE with one of"),
        (("--option", "wait=1"), "wait is no option of the methods libra-removal, rollout"),
        (("--option", "residual=much"), "residual 'much': input should be a valid number"),
        # the older typer: is not in the range x>=1
        (("--num-images", "0"), r"greater than or equal to 1|x>=1"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    arguments: tuple[str, ...], message: str, cli: Launcher, tmp_path: Any
) -> None:
    assert re.search(message, cli.fail("explain", "imagenette", "-o", tmp_path / "out", *arguments))


def test_a_rare_option_has_the_type_of_its_parameter(
    cli: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def explain(*_: object, random_weights: object, **__: object) -> None:
        raise ValueError(f"random_weights is {random_weights!r}")

    monkeypatch.setattr("vit.explanation.explain.explain", explain)
    option = ("--option", "random_weights=false")
    message = cli.fail("explain", "imagenette", "-o", tmp_path / "out", *option)
    assert message == "vit: error: random_weights is False"


@pytest.mark.parametrize("command", [command for command in ALL.values() if command.old_flags])
def test_an_earlier_name_of_an_option_works_and_is_not_listed(command: Command) -> None:
    line = get_command(app)
    line = line.commands[command.run.__name__]  # type: ignore[attr-defined]
    context = line.context_class(line)
    parser = {flag: each for each in line.get_params(context) for flag in each.opts}
    for old, new in command.old_flags.items():
        assert old not in parser
        value = "onnx" if new == "--format" else "9"
        words = [f"{old}={value}", "MODEL", "-o", "out"] if old != "--to" else [old, value, "MODEL"]
        context = line.context_class(line)
        line.parse_args(context, words)
        assert str(context.params[str(parser[new].name)]) == value


def test_an_option_has_one_meaning_in_all_commands() -> None:
    """Options of one name have one kind of value; no command names the same thing otherwise."""
    flags: dict[str, set[object]] = {}
    for command in ALL.values():
        builder = CommandBuilder(command)
        for parameter in [*builder.passed.values(), *builder.own.values()]:
            if parameter.is_keyword:
                flag = builder._find_flag(parameter)
                flags.setdefault(flag, set()).add(parameter.kind)
    assert not {"--to", "--images", "--pictures", "--examples", "--methods"} & flags.keys()
    for name in ("--num-images", "--num-examples"):
        assert flags[name] == {int}
    owners = [name for name, each in ALL.items() if "init" in CommandBuilder(each).passed]
    assert owners == ["vit.training.command"]


# --- arguments from Python
# -------------------------------------------------------------------------------------------------


@check_arguments(count=(1, 9))
def function(
    images: object, *, count: int = 2, name: str | None = None, other: object = None
) -> tuple[object, ...]:
    return images, count, name, other


def test_arguments_are_checked_by_their_annotations() -> None:
    assert function([1], count="3", other={}) == ([1], 3, None, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^count 'x': input should be a valid integer"):
        function([1], count="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^name 3: input should be a valid string"):
        function([1], name=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^count 0 must be at least 1"):
        function([1], count=0)
    with pytest.raises(ValueError, match=r"^count 10 must be at most 9"):
        function([1], count=10)


def test_an_earlier_name_of_a_keyword_works() -> None:
    renamed = accept_old_names(number="count")(function)
    assert renamed([1], number="3") == ([1], 3, None, None)  # type: ignore[call-arg]
    assert list(signature(renamed).parameters) == ["images", "count", "name", "other"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'amount'"):
        renamed([1], amount=3)  # type: ignore[call-arg]
    for name, old, new in (
        ("explain", "count", "num_images"),
        ("audit", "init", "model"),
    ):
        public = getattr(vit, name)
        assert new in signature(public).parameters
        with pytest.raises((ValueError, TypeError, OSError)) as raised:
            public("nowhere", **{old: "nowhere"})
        assert "unexpected keyword" not in str(raised.value)


def test_a_checked_function_keeps_its_signature() -> None:
    assert list(signature(function).parameters) == ["images", "count", "name", "other"]
