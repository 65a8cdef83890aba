"""The docstring examples in tasks/, which pytest does not collect because they import Prefect."""

import doctest
import importlib
import pkgutil

import pytest

import tasks

MODULES = [f"tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name):
    module = importlib.import_module(name)
    done = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.failed == 0
