"""What the shapes of the management API's JSON are made of. A shape is the answer and its schema in one.

The OpenAPI document is made of the shapes: their names, docstrings and fields are part of the API, and the order of the
fields is that of the JSON.
"""

from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

Row = TypeVar("Row")

Tokens = Annotated[int, Meta(ge=0, description="tokens")]
Count = Annotated[int, Meta(ge=0)]
Moment = Annotated[float, Meta(ge=0, description="seconds since 1970, UTC")]
Share = Annotated[float, Meta(ge=0, description="a share; 1 is all of it")]
Dollars = Annotated[float, Meta(description="US dollars at list prices")]
Ref = Annotated[str, Meta(description="the key of an original in the archive", pattern=r"^[0-9a-f]+$")]
Digest = Annotated[str, Meta(description="hexadecimal", pattern=r"^[0-9a-f]*$")]


class Shape(msgspec.Struct):
    """An answer, or a part of one."""

    @classmethod
    def of(cls, row: object, **own: object) -> Self:
        """The fields of ``row`` that have the shape's names, bytes as hexadecimal, but for those in ``own``."""
        values = {name: own[name] if name in own else getattr(row, name) for name in cls.__struct_fields__}
        return cls(**{name: each.hex() if isinstance(each, bytes) else each for name, each in values.items()})

    def plain(self) -> dict[str, Any]:
        """The same as data for JSON."""
        return dict(msgspec.to_builtins(self))


class Page(Shape, Generic[Row]):
    """A page of a list; next is the cursor of the following one, null on the last."""

    data: list[Row]
    next: str | None


class Fault(Shape):
    """What is wrong; param names the parameter or field, weir says what there is."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "permission_error", "requests"]
    param: str | None
    code: Literal[
        "invalid_request", "invalid_json", "invalid_api_key", "request_too_large", "rate_limit_exceeded", "internal"
    ]
    weir: dict[str, Any] | UnsetType = UNSET


class Error(Shape):
    """An error in OpenAI's shape."""

    error: Fault
