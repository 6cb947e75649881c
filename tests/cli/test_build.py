"""A command is built from the public function's signature and its `Args:`."""

import socket
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
from PIL import Image

import vit
from tests.conftest import Launcher
from vit.cli.build import find_flag, read_parameters
from vit.cli.main import COMMANDS, app
from vit.runtime.arguments import check_minimum
from vit.runtime.command import Command
from vit.runtime.signatures import read_signature

ALL: dict[str, Command] = {
    command.run.__name__: command
    for command in (import_module(reference).COMMAND for reference in COMMANDS)
}


@pytest.mark.parametrize("command", ALL.values(), ids=ALL)
def test_every_parameter_of_the_function_is_an_option_or_for_python_only(command: Command) -> None:
    passed, own = read_parameters(command)
    for name, parameter in own.items():
        assert parameter.help, f"{name} has no text under Args:"
    assert set(command.flags) <= passed.keys() | own.keys()
    if not command.function:
        return
    parameters = signature(getattr(vit, command.function)).parameters
    assert passed.keys() == parameters.keys() - set(command.python_only)
    for name, read in passed.items():
        assert read.default == parameters[name].default
        assert read.is_keyword == (parameters[name].kind is parameters[name].KEYWORD_ONLY)
        assert read.help or name in own, f"{name} has no text under Args:"


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
    evaluate, _ = read_parameters(ALL["evaluate"])
    for name in ("batch_size", "device", "precision"):
        assert audit[name].help == evaluate[name].help


# --- modes: an option is passed on, or refused
# -------------------------------------------------------------------------------------------------

# name of the mode → command line, and the parameters that it has no use for
MODES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "audit": (("audit", "photos", "-o", "out"), set()),
    "compare": (("compare", "a", "b", "-o", "out"), set()),
    "evaluate": (("evaluate", "imagenette"), set()),
    "explain": (("explain", "imagenette", "-o", "out"), set()),
    "predict": (("predict", "imagenette", "photos"), set()),
    "predict into a file": (
        ("predict", "imagenette", "photos", "--output", "out.jsonl"),
        set(),
    ),
    "train": (("train", "photos", "-o", "out"), set()),
    "faithfulness": (("faithfulness", "imagenette", "-o", "out"), set()),
    "robustness": (("robustness", "imagenette", "-o", "out"), set()),
    "export": (("export", "imagenette", "-o", "out"), set()),
    "serve": (("serve", "imagenette"), set()),
}


class Received(ValueError):
    """The values that a function was called with."""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos, in which no command does its work."""
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            image = Image.new("RGB", (8, 8), (number, 0, 0))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)

    def receive(*arguments: object, **values: object) -> None:
        raise Received(repr((arguments, values)))

    for command in ALL.values():
        if command.function:
            monkeypatch.setattr(vit, command.function, receive, raising=False)
    monkeypatch.setattr("vit.prediction.predict.iterate_predictions", receive)
    addresses: list[object] = []

    def listen(address: object) -> Any:
        addresses.append(address)
        return socket.socket()

    monkeypatch.setattr("socket.create_server", listen)
    monkeypatch.setattr("vit.bundle.open_model", lambda _, device: (device, addresses))
    monkeypatch.setattr("vit.deploy.serve.app.build_app", receive)
    return tmp_path


def find_words(command: Command, parameter: Any) -> tuple[list[str], str]:
    """An option with a value that isn't its default, and the value as a function receives it."""
    flag = find_flag(command, parameter)
    if parameter.kind is bool:
        on, _, off = flag.partition("/")
        value = not parameter.default
        return [on if value or not off else off], f"'{parameter.name}': {value}"
    choices = [each for each in get_args(parameter.kind) if isinstance(each, str)]
    text = next((each for each in reversed(choices) if each != parameter.default), "9")
    return [flag, text], text


@pytest.mark.parametrize("mode", MODES)
def test_an_option_is_used_or_refused(mode: str, cli: Launcher, desk: Path) -> None:
    words, unused = MODES[mode]
    command = ALL[words[0]]
    passed, own = read_parameters(command)
    refused = set()
    for name, parameter in (passed | own).items():
        flag = find_flag(command, parameter).partition("/")[0]
        if not parameter.is_keyword or flag in words or name == "output":
            continue
        option, value = find_words(command, parameter)
        message = cli.fail(*words, *option)
        if " effect " in message:
            assert message.startswith(f"vit: error: {flag} has ")
            refused.add(name)
        # the others are used by the command itself
        elif name not in own or words[0] in ("train", "serve"):
            assert value in message, (option, message)
    assert refused == unused


def test_numbers_have_minima(cli: Launcher) -> None:
    with pytest.raises(ValueError, match=r"^count 0 must be at least 1"):
        check_minimum(1, count=0)
    check_minimum(1, count=1, other=None)
    assert "top_k 0 must be" in cli.fail("predict", "imagenette", "docs", "--top-k", "0")
