"""Completion in the shell, and the image of `docker build`."""

import re
import shlex
import subprocess

from tests.conftest import ROOT, Launcher

# the name of the program is the one that the shell knows
_AS_COMMAND = ("-c", "import sys; sys.argv[0] = 'vit'; from vit.cli.main import main; main()")


def test_the_shell_completes_commands_and_options(cli: Launcher) -> None:
    for words, completions in (
        ("vit ev", ["evaluate"]),
        ("vit evaluate --calib", ["--calibrate"]),
    ):
        environment = {
            "_VIT_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        outcome = cli.finish(cli.start(program=_AS_COMMAND, env=environment))
        assert outcome.out.split() == completions


def test_the_image_is_for_a_user_who_is_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", text).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    kinds = [kind for kind, *_ in steps]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    (user,) = (value for kind, value in steps if kind == "USER")
    assert user == "vit"
    scripts = [value for kind, value in steps if kind == "RUN"]
    # in the shell that docker uses, as far as it says whether they can be read
    for script in scripts:
        subprocess.run(["sh", "-n", "-c", script], check=True)
    words = shlex.split(" ".join(scripts))
    assert "/source" in words
    assert words[words.index("useradd") + 1 :][:2] == ["--create-home", user]
    # a version of Python that the package supports
    (base,) = (value for kind, value in steps if kind == "FROM")
    assert re.fullmatch(r"python:3\.1[123]-slim", base)
