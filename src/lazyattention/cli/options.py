# SPDX-License-Identifier: Apache-2.0
"""Command-line flags made from the fields of EngineConfig, so that flag, default, help and docs cannot drift apart."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from lazyattention.config import EngineConfig

ENGINE_PANEL = "Engine options"


def engine_fields(config: type = EngineConfig) -> dict[str, tuple[Field[Any], Any]]:
    """Return field name -> (field, type) of every option, those of nested configs included."""
    hints = get_type_hints(config)
    options: dict[str, tuple[Field[Any], Any]] = {}
    for field in fields(config):
        if is_dataclass(hints[field.name]) and isinstance(hints[field.name], type):
            options |= engine_fields(hints[field.name])
        else:
            options[field.name] = (field, hints[field.name])
    return options


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one flag per engine option; those set by the user arrive as its keyword `engine_options`.

    A flag that is not given stays out of `engine_options`, so the config's own default holds.
    """
    signature = inspect.signature(command, eval_str=True)
    options = engine_fields()

    @functools.wraps(command)
    def run(**kwargs: object) -> None:
        given = {name: kwargs.pop(name) for name in options}
        command(**kwargs, engine_options={name: value for name, value in given.items() if value is not None})

    own = [parameter for name, parameter in signature.parameters.items() if name != "engine_options"]
    flags = [_flag(name, field, kind) for name, (field, kind) in options.items()]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *flags]]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
    return run


def _flag(name: str, field: Field[Any], kind: Any) -> inspect.Parameter:  # noqa: ANN401  # a type expression
    choices = field.metadata.get("choices")
    text = field.metadata["help"] + (f" One of: {', '.join(choices)}." if choices else "")
    default = "" if field.default is None or field.default is False else str(field.default)
    flag = f"--{name.replace('_', '-')}"
    if bool in get_args(kind):
        flag += f"/--no-{flag[2:]}"
    option = typer.Option(flag, help=text, show_default=default or False, rich_help_panel=ENGINE_PANEL)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
