"""A run's parameters as JSON, without FastAPI.

Prefect writes the parameters of a run that it creates itself with FastAPI's encoder. To import that
is to import all of FastAPI, 0.15 s of CPU, and for what our flows take pydantic gives the same.
"""

from typing import Any

from prefect import Flow
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

_KNOWN = (BaseModel, str, bool, int, float, type(None))


def write_parameters_alone(flow: Flow[..., Any]) -> None:
    """Let a flow write its parameters itself; what is none of ours is left to Prefect.

    Were the method to be called otherwise one day, FastAPI would be imported again, and no more.
    """
    if "serialize_parameters" in vars(flow):  # an earlier command of this process did
        return
    theirs = flow.serialize_parameters

    def serialize_parameters(parameters: dict[str, object]) -> dict[str, object]:
        if not all(map(_is_known, parameters.values())):
            return theirs(parameters)
        return {name: to_jsonable_python(value) for name, value in parameters.items()}

    flow.serialize_parameters = serialize_parameters  # type: ignore[method-assign]  # Prefect offers no hook


def _is_known(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_known, value))
    return isinstance(value, _KNOWN)
