"""The fields that may stand at one place of a nested value, for errors that suggest the field that may be meant.

A model is a class with `model_fields` by name, each with its `annotation`, as pydantic's models have them.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin


def fields_beside(annotation: Any, loc: Sequence[int | str]) -> tuple[str, ...]:
    """The fields that the object may have in which the last part of `loc` stands; none if its model is not known.

    `annotation` is the type of the whole value: a model, or for example `Model | None`.
    """
    models = _models_in(annotation)
    for part in loc[:-1]:
        if isinstance(part, int):  # a place in a list
            continue
        if len(models) > 1:  # one of several models, chosen by its tag or named
            models = [one for one in models if part == one.__name__ or part in _tags(one)]
        elif models and (field := models[0].model_fields.get(part)) is not None:
            models = _models_in(field.annotation)
    return tuple(models[0].model_fields) if len(models) == 1 else ()


def _models_in(annotation: Any) -> list[Any]:
    """The models in an annotation, such as `Rule` in that of `list[Rule] | None`."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [found for one in get_args(annotation) for found in _models_in(one)]


def _tags(model: Any) -> set[Any]:
    """The literal values of a model's fields, by one of which a union chooses the model."""
    literals = (field.annotation for field in model.model_fields.values() if get_origin(field.annotation) is Literal)
    return {value for literal in literals for value in get_args(literal)}
