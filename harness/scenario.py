"""Scenario files: found, read, changed by ``--set``, and refused with words that help.

Here: TOML in, a valid `Scenario` or a `ScenarioError` with every problem out, and the record that lets a run
be repeated without the file. Arms and trials come from `harness.arms`, handed on from here. Not here: the
keys (`scenario_model.py`), the rules between them (`scenario_rules.py`) and running.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from harness.arms import ArmPlan, Expectation, TrialPlan, arm_string, expand, plan_arms
from harness.fault_model import registered
from harness.scenario_faults import FaultTable, ForeignFault
from harness.scenario_model import Scenario
from harness.scenario_rules import Problem, broken_rules
from harness.toggles import BUILTIN

__all__ = [
    "ArmPlan", "Expectation", "Problem", "Scenario", "ScenarioError", "TrialPlan", "arm_string", "corpus_files",
    "expand",
    "find_scenario", "from_record", "list_scenarios", "load", "model_for", "plan_arms", "record", "scenario_files",
]  # fmt: skip

SETTING = "--set"


class ScenarioError(ValueError):
    """A scenario cannot be used. ``problems`` has an entry for each mistake; none is hidden by another."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


# --- finding -----------------------------------------------------------------------------------------------


def scenario_files() -> dict[str, Path]:
    """The scenarios that come with hangrig: file by name."""
    folder = Path(str(importlib.resources.files("scenarios")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def corpus_files() -> dict[str, Path]:
    """The scenarios of the hang corpus and its controls: file by name."""
    folder = Path(str(importlib.resources.files("scenarios"))) / "corpus"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def list_scenarios(files: Mapping[str, Path] | None = None) -> tuple[Scenario, ...]:
    """The scenarios that come with hangrig, or those of ``files``. Raises ScenarioError when one is broken."""
    return tuple(load(path) for path in (scenario_files() if files is None else files).values())


def find_scenario(name_or_path: str) -> Path:
    """The file of a scenario, by path or by the name of one that comes with hangrig. Raises ScenarioError."""
    path = Path(name_or_path)
    known = scenario_files() | corpus_files()
    if path.suffix == ".toml" or path.parent != Path():
        if path.is_file():
            return path
        raise _lone_problem(
            name_or_path, "scenario", None, "is no file", "give a .toml file or a scenario's name"
        )
    if name_or_path in known:
        return known[name_or_path]
    close = difflib.get_close_matches(name_or_path, known, n=1)
    guess = f"did you mean {close[0]}?" if close else f"known: {', '.join(scenario_files())}"
    shown = "hangrig list shows all, with --corpus those of the corpus"
    raise _lone_problem(name_or_path, "scenario", None, "has no such name", f"{guess} ({shown})")


def _lone_problem(where: str, key: str, value: str | None, what: str, remedy: str) -> ScenarioError:
    return ScenarioError([Problem(where, key, value, what, remedy)])


# --- loading -----------------------------------------------------------------------------------------------


def load(path: str | Path, settings: Sequence[str] = (), device: str | None = None) -> Scenario:
    """Reads a scenario file and applies ``settings`` (``KEY=VALUE``) before it is validated.

    ``device`` is where it will run (None: where the scenario says, else sim): ``sim.…`` may be set there only.
    Raises ScenarioError.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _lone_problem(
            str(path), "file", None, f"cannot be read: {error.strerror}", "check it"
        ) from error
    except UnicodeDecodeError as error:
        raise _lone_problem(str(path), "file", None, f"is no UTF-8: {error}", "save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise _lone_problem(str(path), "file", None, f"is no TOML: {error}", "mend it there") from error
    return validate(document, str(path), settings, device)


def validate(
    document: Mapping[str, Any],
    where: str,
    settings: Sequence[str] = (),
    device: str | None = None,
    *,
    narrowed: bool = False,
) -> Scenario:
    """The scenario that ``document`` and ``settings`` make. ``where`` is named in problems.

    ``narrowed``: arms were left out, so that expectations without an arm are no mistake; settings tell by
    themselves.
    """
    changed: dict[str, Any] = json.loads(json.dumps(document, default=str))
    keys, problems = apply_settings(changed, settings, device or _own_device(changed))
    if problems:
        raise ScenarioError(problems)
    if isinstance(model := changed.get("model"), dict) and isinstance(model.get("directory"), str):
        model["directory"] = _directory(model["directory"], changed)
    model = model_for(changed)
    try:
        scenario = model.model_validate(changed)
    except ValidationError as error:
        raise ScenarioError(_from_pydantic(error, changed, where, keys, model)) from error
    narrowed = narrowed or any(key.split(".")[0] in ("arms", "toggles", "expect") for key in keys)
    broken = [
        Problem(_origin(key, where, keys, model), key, None if value is None else _toml(value), what, remedy)
        for key, value, what, remedy in broken_rules(scenario, narrowed=narrowed)
    ]
    if broken:
        raise ScenarioError(broken)
    return scenario


def _directory(text: str, document: Mapping[str, Any]) -> str:
    """Absolute, because a rerun may start elsewhere; but a name that only a foreign engine can resolve."""
    target = document.get("target")
    foreign = isinstance(target, dict) and target.get("name", BUILTIN) != BUILTIN
    if foreign and not text.startswith((".", "~", "/")) and not Path(text).is_dir():
        return text
    return str(Path(text).expanduser().absolute())


def model_for(document: Mapping[str, Any]) -> type[Scenario]:
    """The scenario's model with the faults that its target knows; for the built-in engine those are registered."""
    target = document.get("target")
    name = target.get("name", BUILTIN) if isinstance(target, dict) else BUILTIN
    return _with_faults(tuple(registered().values()) if name == BUILTIN else None)


@lru_cache(maxsize=8)
def _with_faults(own: tuple[type[FaultTable], ...] | None) -> type[Scenario]:
    one: Any = ForeignFault if own is None else Annotated[reduce(or_, own), Field(discriminator="name")]
    return create_model("Scenario", __base__=Scenario, __doc__=Scenario.__doc__, faults=(tuple[one, ...], ()))


def _own_device(document: Mapping[str, Any]) -> str:
    target = document.get("target")
    own = target.get("device") if isinstance(target, dict) else None
    return own if isinstance(own, str) else "sim"


def record(scenario: Scenario, arms: Sequence[ArmPlan], device: str) -> dict[str, Any]:
    """What run.json keeps of a scenario: enough to run it again without the file."""
    ignored = {} if device == "sim" else {"sim": scenario.sim.model_dump(mode="json")}
    return {
        "name": scenario.name,
        "summary": scenario.summary,
        "reports": list(scenario.reports),
        "text": scenario.model_dump_json(exclude_none=True),
        "ignored": ignored,
        "arms": [arm.to_json() for arm in arms],
    }


def from_record(stored: Mapping[str, Any], settings: Sequence[str] = (), device: str = "sim") -> Scenario:
    """The scenario of a stored run. Raises ScenarioError when an older hangrig's keys are gone."""
    where = f"the stored scenario {stored.get('name')}"
    try:
        document = json.loads(stored["text"])
    except (KeyError, TypeError, ValueError) as error:
        raise _lone_problem(where, "text", None, f"is damaged: {error}", "run the scenario anew") from error
    # Settings may have left arms out when it was run; what was valid then is valid now.
    return validate(document, where, settings, device, narrowed=True)


# --- settings ----------------------------------------------------------------------------------------------


def apply_settings(
    document: dict[str, Any], settings: Sequence[str], device: str
) -> tuple[dict[str, str], list[Problem]]:
    """Writes ``KEY=VALUE`` settings into ``document``. Returns the text set by key, and problems."""
    keys: dict[str, str] = {}
    problems = []
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key):
            remedy = "write a dotted key, = and a TOML value: --set workload.requests=401"
            problems.append(Problem(SETTING, setting, None, "is no KEY=VALUE", remedy))
            continue
        if key.split(".")[0] == "sim" and device != "sim":
            what = f"is about the simulated device, and the device is {device}"
            problems.append(Problem(SETTING, key, text, what, "leave it out or use --device sim"))
            continue
        blocked = _write(document, key.split("."), _value(text))
        if blocked is not None:
            problems.append(Problem(SETTING, key, text, f"{blocked} is no table", "set that key itself"))
        keys[key] = text
    if "model.directory" in keys and "model.preset" not in keys and isinstance(document.get("model"), dict):
        document["model"].pop("preset", None)  # whoever names a directory does not want the file's preset
    return keys, problems


def _value(text: str) -> Any:
    """A TOML value; what is none is a bare string, so that no quotes need to survive a shell."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _write(document: dict[str, Any], path: Sequence[str], value: Any) -> str | None:
    """Sets ``path``, making tables on the way. Returns the key that is in the way, or None."""
    table: Any = document
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(table, list) and key.isdecimal() and int(key) < len(table):
            position: Any = int(key)
        elif isinstance(table, dict):
            position = key
        else:
            return ".".join(path[:depth])
        if last:
            table[position] = value
        else:
            table = table.setdefault(position, {}) if isinstance(table, dict) else table[position]
    return None


# --- wording -----------------------------------------------------------------------------------------------


def _origin(key: str, where: str, keys: Mapping[str, str], model: type[Scenario]) -> str:
    """``--set`` for a key that a setting wrote, or that is unknown because one wrote into it; else the file."""
    within = any(key == k or key.startswith(f"{k}.") for k in keys)
    return (
        SETTING
        if within or (key not in _keys(model) and any(k.startswith(f"{key}.") for k in keys))
        else where
    )


def _toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _from_pydantic(
    error: ValidationError,
    document: Mapping[str, Any],
    where: str,
    keys: Mapping[str, str],
    model: type[Scenario],
) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        path = _without_tags(detail["loc"], model)
        key = ".".join(map(str, path)) or "file"
        missing = detail["type"] in ("missing", "union_tag_not_found")
        if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
            key = f"{key}.{_discriminator(path)}"
        value = None if missing else _toml(_look_up(document, key))
        what, remedy = _words(detail, path, model)
        yield Problem(_origin(key, where, keys, model), key, value, what, remedy)


def _without_tags(location: Sequence[int | str], model: type[Scenario]) -> list[int | str]:
    """pydantic puts the workload's kind, or a fault's name, into the path; a file has no such key."""
    at = {"workload": 1, "faults": 2}.get(str(location[0]) if location else "")
    tags = (*_tags(model, "workload", "kind"), *_tags(model, "faults", "name"))
    return [part for i, part in enumerate(location) if not (i == at and part in tags)]


def _discriminator(path: Sequence[int | str]) -> str:
    return "name" if path[:1] == ["faults"] else "kind"


def _look_up(document: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(document, list) and part.isdecimal() and int(part) < len(document):
            document = document[int(part)]
        elif isinstance(document, dict) and part in document:
            document = document[part]
        else:
            return document  # a scalar that stands for a list of one
    return document


def _words(detail: ErrorDetails, path: Sequence[int | str], model: type[Scenario]) -> tuple[str, str]:
    """What is wrong, and what to do."""
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return "unknown key", _guess_key(path, model)
        case "missing":
            return "is missing", "add it"
        case "union_tag_not_found":
            return "is missing", f"allowed: {', '.join(_choices(path, model))}"
        case "union_tag_invalid":
            what_to_do = _guess_value(str(context["tag"]), _choices(path, model))
            if path[0] == "faults":
                what_to_do += "; one of your own: --faults FILE"
            return "is not allowed", what_to_do
        case "literal_error":
            allowed = re.findall(r"'([^']*)'", str(context["expected"]))
            return "is not allowed", _guess_value(str(detail["input"]), allowed)
        case "value_error":
            return str(context["error"]), "change it"
        case "string_pattern_mismatch":
            return "has other characters than a-z, 0-9, - and _", "rename it"
    message = detail["msg"].removeprefix("Input ")
    return message, "change it"


def _guess_value(value: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, allowed, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{guess}allowed: {', '.join(allowed)}"


def _guess_key(path: Sequence[int | str], model: type[Scenario]) -> str:
    *tables, name = [part for part in path if isinstance(part, str)]
    keys = _keys(model)
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == ".".join(tables)}
    near = [siblings[one] for one in difflib.get_close_matches(name, siblings, n=1)]
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name]  # the right name in the wrong table
    close = [*near, *elsewhere] if tables else [*elsewhere, *near]
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{guess}allowed: {', '.join(siblings)}"


def _choices(path: Sequence[int | str], model: type[Scenario]) -> Sequence[str]:
    faults = _discriminator(path) == "name"
    return _tags(model, "faults", "name") if faults else _tags(model, "workload", "kind")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models inside a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _models(field.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")


@lru_cache(maxsize=8)
def _keys(model: type[Scenario]) -> Sequence[str]:
    """Every dotted key of the file format."""
    return tuple(dict.fromkeys(_all_keys(model)))


@lru_cache(maxsize=16)
def _tags(model: type[Scenario], field: str, tag: str) -> Sequence[str]:
    """The values of ``tag`` that tell the models inside ``field`` apart."""
    return tuple(
        value
        for one in _models(model.model_fields[field].annotation)
        for value in get_args(one.model_fields[tag].annotation)
    )
