import re
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from flows.command import command as prepare
from packhouse.cli import cli
from packhouse.registry import COMMAND_GROUPS, COMMANDS


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


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("packhouse ")])
def test_each_help_text_has_an_example_that_parses_and_shows_output(name):
    command = ALL[name]
    shown = command.get_help(click.Context(command, info_name=name)).splitlines()
    examples = re.findall(r"^ *\$ (packhouse .*?)(?:  +#.*)?$", command.help, flags=re.M)
    assert any(example.startswith(name) for example in examples)
    for example in examples:
        at = next(number for number, line in enumerate(shown) if f"$ {example}" in line)
        assert len(shown) > at + 1
        words = shlex.split(example)
        named = max((each for each in ALL if words[: each.count(" ") + 1] == each.split()), key=len)
        ALL[named].make_context(named, words[named.count(" ") + 1 :])
    assert max(map(len, shown)) <= 80
    assert not [line for line in shown if "\\b" in line or "\b" in line]  # click's markup
    assert isinstance(command, click.Group) or "--json" in {
        option for parameter in command.params for option in parameter.opts
    }


def test_each_command_is_in_one_group():
    assert [name for names in COMMAND_GROUPS.values() for name in names] == list(COMMANDS)


def test_packhouse_alone_shows_the_first_three_commands():
    done = CliRunner().invoke(cli, [])
    assert done.exit_code == 0
    commands_shown = re.findall(r"^  packhouse (\w+) ", done.stdout, flags=re.M)
    assert commands_shown == ["init", "prepare", "inspect"]
    assert "packhouse --help" in done.stdout
