"""Reading the fields of a Hugging Face config, with errors that name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import require

HfConfig = Mapping[str, Any]


def get(config: HfConfig, field: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """A field of a type, or its default. ValueError naming the field."""
    value = config.get(field, default)
    if value is ...:
        raise ValueError(f"config.json: field {field!r} is missing")
    good = isinstance(value, kind) and not (isinstance(value, bool) and kind is int)
    require(good or value is default, field, value, f"{kind}")
    return value


def get_any(
    config: HfConfig, fields: tuple[str, ...], kind: type | tuple[type, ...], default: Any = ...
) -> Any:
    """A field that is published under several names: the first that is there and not null."""
    for field in fields:
        if config.get(field) is not None:
            return get(config, field, kind)
    return get(config, fields[0], kind) if default is ... else default
