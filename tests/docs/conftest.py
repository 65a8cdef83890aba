"""The working directory of tests of pages, always the same: see tests/commands/conftest.py."""

from tests.commands.conftest import home, one_folder

__all__ = ["home", "one_folder"]
