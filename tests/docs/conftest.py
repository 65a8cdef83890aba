"""The working directory of tests that follow a page: always the same (tests/commands/conftest.py)."""

from tests.commands.conftest import home, one_folder

__all__ = ["home", "one_folder"]
