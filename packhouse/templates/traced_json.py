r"""JSON of a row in a template: objects that it takes apart, and texts that `tojson` writes.

The library writes the JSON. Texts and objects of the row stand in it as `\0number\0`, and their
own parts take these places:

    {"name": "hi"}  ->  {"name": "\00\0"}  ->  '{"name": "', 'hi' of the field, '"}'
"""

import re
from collections.abc import Callable
from typing import Any

from packhouse.templates.provenance import Field, JsonForm, Part, Piece, encoder
from packhouse.templates.traced_text import (
    Method,
    TracedText,
    forget,
    is_traced,
    parts_of,
    text_of,
    traced,
)


class DataObject(dict[Any, Any]):
    """A JSON object of the row, which can be written whole, or taken apart.

    Args:
        field: of the object as a whole.
        items: its items where they are fields of their own. None: it is opened at the first look
            into it, and the row is none that others are filled like.
    """

    def __init__(self, field: Field, items: dict[Any, Any] | None = None) -> None:
        super().__init__(field.value if items is None else items)
        self._field, self._is_open = field, items is not None

    def _open(self) -> None:
        forget(self, "open")
        self._is_open = True
        items = list(dict.items(self))
        dict.clear(self)
        for key, value in items:
            own = _opened(key, self._field)
            dict.__setitem__(self, own, _opened(value, self._field))


def _opened(value: object, parent: Field) -> object:
    """A value within an object, with its strings traced."""
    if isinstance(value, list):
        return [_opened(item, parent) for item in value]
    if not isinstance(value, str | dict) or not value:
        return value
    field = Field(parent.trace, parent.message, parent.kind, value, None, parent)
    return text_of(field) if isinstance(value, str) else DataObject(field)


def _looking(name: str) -> Method:
    def method(self: DataObject, *args: object) -> object:
        if not self._is_open:
            self._open()
        return getattr(dict, name)(self, *args)

    return method


for _name in (
    *("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__or__"),
    *("__ror__", "__reversed__", "get", "items", "keys", "values", "copy"),
):
    setattr(DataObject, _name, _looking(_name))


_HIDDEN = re.compile(r'"\\u0000([0-9]+)\\u0000"')


def to_json(value: object, form: JsonForm) -> str:
    """A value as JSON, in which each text keeps its provenance."""
    if isinstance(value, DataObject):
        return traced((Piece(value._field.to_json(form), value._field, 0, 1, form),))
    if not is_traced(value):
        return encoder(form)(value)
    found: list[str | DataObject] = []
    text = encoder(form._replace(sort_keys=False))(_hidden(value, form, found))
    parts: list[Part] = []
    # '{"a": "\\u00000\\u0000"}' splits to '{"a": ', '0', '}': every second one is a number.
    for number, constant in enumerate(_HIDDEN.split(text)):
        if number % 2 == 0:
            parts.append(constant)
            continue
        own, write = found[int(constant)], encoder(form)
        if not isinstance(own, TracedText):
            parts += parts_of(to_json(own, form))
            continue
        forget(own, "to_json")
        parts += ['"', *(_in_json(part, write) for part in own._parts), '"']
    return traced(parts)


def _in_json(part: Part, write: Callable[[Any], str]) -> Part:
    if not isinstance(part, Piece):
        return write(str.__str__(part))[1:-1]
    return part._replace(text=write(part.text)[1:-1], form=part.form or "string")


def _hidden(value: Any, form: JsonForm, found: list[Any]) -> object:
    r"""A value in which `\0number\0` stands for each text and object of the row, and each `\0`."""
    is_hidden = isinstance(value, TracedText) or (isinstance(value, str) and "\0" in value)
    if is_hidden or (isinstance(value, DataObject) and form.indent is None):
        found.append(value)
        return f"\0{len(found) - 1}\0"
    if isinstance(value, dict):
        items = list(value.items())
        if form.sort_keys:
            items.sort(key=lambda item: str.__str__(item[0]))
        return {_hidden(k, form, found): _hidden(v, form, found) for k, v in items}
    if isinstance(value, list | tuple):
        return [_hidden(item, form, found) for item in value]
    return value
