import re
import subprocess
import sys

import click
import pytest

from flows.command import command as prepare
from packhouse.cli import cli


def commands(command, name):
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            yield from commands(command.get_command(context, below), f"{name} {below}")


ALL = dict([*commands(cli, "packhouse"), *commands(prepare, "prepare")])


def test_the_list_of_commands_imports_none_of_them():
    script = "import sys; from packhouse.cli import cli; cli(['--help'], standalone_mode=False); "
    script += "print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split()[-1] == "False", done.stderr


@pytest.mark.parametrize("name", ALL)
def test_no_help_text_shows_its_markup(name):
    command = ALL[name]
    shown = command.get_help(click.Context(command, info_name=name))
    assert "\\b" not in shown
    assert "\b" not in shown


@pytest.mark.parametrize(
    "name", [name for name in ALL if "    packhouse" in (ALL[name].help or "")]
)
def test_each_example_of_a_help_text_is_a_line(name):
    command = ALL[name]
    shown = command.get_help(click.Context(command, info_name=name))
    examples = re.findall(r"^ *(packhouse .*)", command.help, flags=re.M)
    assert examples
    assert {line.strip() for line in shown.splitlines()} >= {line.strip() for line in examples}
