"""What every section of a recipe shares: frozen, closed, and no boolean taken for a number."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]|\.[a-z0-9_-])*$", max_length=64)]

HUB_NAME = re.compile(r"(?!.*\.\.)(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
"""A name of the Hugging Face Hub: `org/name`, perhaps with a branch, a tag or a commit.

The Hub's client makes paths of a revision, so `..` is in none.
"""

IN_A_FILE = "in a file"
"""Context of a recipe whose names are final; those of a run form may be names of places."""

Share = Annotated[float, Field(ge=0, le=1)]

# A server holds parameters against this before it stores them: no `user:password@`, not even with
# a slash in the password, as AWS makes them; no signature; nothing that looks like a key.
_NO_CREDENTIALS = (
    r"^(?![^/]*://[^/?#]*@)"
    r"(?![^/]*://[^/?#:]*:(?![0-9]*(?:[/?#]|$)))"
    r"(?!.*[?&;#](?:[Xx]-[Aa][Mm][Zz]-[A-Za-z-]+|AWSAccessKeyId|[Ss]ignature|SIGNATURE|sig|SIG"
    r"|[A-Za-z_-]*(?:[Ss]ecret|SECRET|[Pp]assword|PASSWORD|[Tt]oken|TOKEN|[Kk]ey|KEY"
    r"|[Kk]ey_?[Ii]d|KEY_?ID))=)"
    r"(?!.*(?:AKIA|ASIA)[A-Z0-9]{16})(?!.*hf_[A-Za-z0-9]{30,})"
)

Uri = Annotated[str, Field(json_schema_extra={"pattern": _NO_CREDENTIALS})]
"""A place, without credentials; what reads it refuses them, too, without repeating them."""


def _as_form(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Say in the schema how a run form shows the section: its name, its fields in their order.

    A server on PostgreSQL keeps schemas as JSONB, which sorts keys by length; `position` is what
    Prefect's form sorts by.
    """
    schema["title"] = model.__name__.removesuffix("Config")
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


class Section(BaseModel):
    """A frozen section that knows all its keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra=_as_form,
        hide_input_in_errors=True,  # it may be a secret in the wrong field
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic would take `true` for 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("takes no boolean")
        return value
