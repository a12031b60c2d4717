"""Arranges settings as a tree of parts, each a small model that holds only its own settings.

A part is chosen among alternatives by its `kind`. Settings can also be given flat, without naming the part
that they belong to: `{policy_loss: gspo, clip_high: 0.3}` means
`{policy_loss: {kind: gspo, clip_high: 0.3}}`. A setting that no chosen part has is refused, with the parts
that do have it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from areal_agents.core.settings import Settings

NONE = "none"  # the kind of an alternative that does nothing


class Part(Settings):
    """A frozen group of settings; if it is one of several alternatives, its field `kind` says which."""


def fill(model: type[BaseModel], given: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tree of settings that `model` validates from any mixture of flat and nested settings.

    Given settings take precedence over the preset. If the given kind of a part differs from the preset's,
    none of the preset's settings of that part are used. A flat setting selects its part if the part would
    otherwise be "none" and only one alternative has this setting.

    Args:
        model: its fields are plain settings, parts, or unions of parts.
        given: what the user wrote.
        preset: flat settings; the name of a part sets its kind.

    Raises:
        ValueError: a setting is unknown, belongs to a part that was not chosen, or is given twice; the
            message names all faults.
    """
    if wrong := [*_keys_that_are_no_strings(given)]:
        raise ValueError("; ".join(f"a key must be a string, got {as_yaml(key)}" for key in wrong))
    left = dict(given)
    faults: list[str] = []
    tree = _fill(model, left, preset, faults)
    faults += [_unplaced(model, name, value) for name, value in left.items()]
    if faults:
        raise ValueError("; ".join(faults))
    return tree


def alternatives(field: FieldInfo) -> dict[str, type[Part]]:
    """The parts that a field may contain, by kind, or under "" if there is only one; empty for a plain
    setting."""
    members = list(_members(field.annotation))
    if not members or not all(isinstance(m, type) and issubclass(m, Part) for m in members):
        return {}
    return {_kind_of(member): member for member in members}


def _keys_that_are_no_strings(tree: Mapping[Any, Any]) -> Iterator[Any]:
    for key, value in tree.items():
        if not isinstance(key, str):
            yield key
        if isinstance(value, Mapping):
            yield from _keys_that_are_no_strings(value)


def kind_given(
    model: type[BaseModel], name: str, given: Mapping[str, Any], preset: Mapping[str, Any]
) -> type[Part] | None:
    """The alternative with which a field would be filled; None if there is none of the given kind."""
    field, value = model.model_fields[name], given.get(name)
    if isinstance(value, Part):
        return type(value)
    kind = (value.get("kind") if isinstance(value, Mapping) else value) or preset.get(
        name, _default_kind(field)
    )
    return alternatives(field).get(kind) if isinstance(kind, str) else None


def settings_of(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every setting that can be given flat, with the part and kind that it needs, or "" if it needs none.

    For example ("clip_high", "policy_loss: ppo"); the name of a part is a setting too.
    """
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        parts = alternatives(field)
        if not parts or "" not in parts:
            yield name, ""
        for kind, part in parts.items():
            for inner, needed in settings_of(part):
                yield inner, needed or (f"{name}: {kind}" if kind else "")


def differing(chosen: BaseModel, default: BaseModel) -> Iterator[tuple[str, Any]]:
    """The flat settings, with their values, in which a part differs from another part of the same kind."""
    for name in type(chosen).model_fields:
        ours, theirs = getattr(chosen, name), getattr(default, name)
        if ours == theirs:
            continue
        if isinstance(ours, Part) and type(ours) is type(theirs):
            yield from differing(ours, theirs)
        else:
            yield name, getattr(ours, "kind", ours)


def as_yaml(value: Any) -> str:
    """Return a setting as the user would write it in YAML, on one line: null, true, 'text', [1, 2]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    return repr(value)


def _fill(
    model: type[BaseModel], left: dict[str, Any], preset: Mapping[str, Any], faults: list[str]
) -> dict[str, Any]:
    """Do the same as `fill`, and remove the settings that are used from `left`."""
    tree: dict[str, Any] = {}
    slots = {name: parts for name, field in model.model_fields.items() if (parts := alternatives(field))}
    for name in model.model_fields:
        if name not in slots and name != "kind":
            if name in left:
                tree[name] = left.pop(name)
            elif name in preset:
                tree[name] = preset[name]
    for name, parts in slots.items():
        given = left.pop(name, {})
        if isinstance(given, Part):
            tree[name] = given
            continue
        own = {"kind": given} if isinstance(given, str) else given
        if not isinstance(own, Mapping):
            faults.append(
                f"{name} must be one of {', '.join(filter(None, parts))}, or a mapping, got {as_yaml(given)}"
            )
            continue
        inner = dict(own)
        standard = str(preset.get(name, _default_kind(model.model_fields[name])))
        kind = inner.pop("kind", None)
        if kind is None:
            kind = _chosen_by_setting(parts, left) if standard == NONE and not inner else None
            kind = standard if kind is None else kind
        if not isinstance(kind, str) or kind not in parts:
            near = difflib.get_close_matches(str(kind), parts, n=1, cutoff=0.0)[0]
            faults.append(
                f"{name}: there is no {as_yaml(kind)}; did you mean {near!r}? Known: {', '.join(parts)}"
            )
            continue
        names = {setting for setting, _ in settings_of(parts[kind])}
        for setting in sorted(names & left.keys()):
            if setting in inner:
                faults.append(f"{setting} is given twice, on its own and in {name}; remove one of them")
            inner[setting] = left.pop(setting)
        filled = _fill(parts[kind], inner, preset if kind == standard else {}, faults)
        faults += [_unplaced(parts[kind], unknown, value, where=name) for unknown, value in inner.items()]
        tree[name] = {"kind": kind, **filled} if kind else filled
    return tree


def _chosen_by_setting(parts: Mapping[str, type[Part]], left: Iterable[str]) -> str | None:
    """The kind of the only alternative that has one of the settings `left`; None if there is not one."""
    wanted = set(left)
    having = [kind for kind, part in parts.items() if wanted & {name for name, _ in settings_of(part)}]
    return having[0] if len(having) == 1 else None


def _unplaced(model: type[BaseModel], name: str, value: Any, *, where: str = "") -> str:
    """Describe why a setting cannot be used."""
    known: dict[str, list[str]] = {}
    for setting, needed in settings_of(model):
        known.setdefault(setting, []).append(needed)
    if name in known:
        choices = [part for part in dict.fromkeys(known[name]) if part]
        shown = value if isinstance(value, str) else as_yaml(value)
        return f"{name}: {shown} needs {' or '.join(choices)}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown setting {f'{where}.' if where else ''}{name}; {hint}"


def _kind_of(part: type[Part]) -> str:
    field = part.model_fields.get("kind")
    return "" if field is None else str(get_args(field.annotation)[0])


def _default_kind(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return getattr(default, "kind", "")


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    arguments = get_args(annotation)
    if arguments and not isinstance(annotation, type):
        for argument in arguments:
            yield from _members(argument)
    else:
        yield annotation
