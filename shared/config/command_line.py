"""Read the fields of a dataclass from flags and YAML files, and write them as YAML; every error is one line.

tyro makes --help from the field docstrings. This module parses the values itself: a flag and a line of YAML must mean
the same, an error must name its source, and a recipe must start on a machine without tyro.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from shared.disk import replace_file
from shared.errors import UserError

# Names that other programs have for settings of ours.
OTHER_NAMES = {
    "batch_size": "global_batch_size",
    "bf16": "mixed_precision",
    "epochs": "num_train_epochs",
    "fp16": "mixed_precision",
    "lr": "learning_rate",
    "max_seq_length": "max_length",
    "max_steps": "max_train_steps",
    "model": "model_name_or_path",
    "num_workers": "dataloader_num_workers",
    "optimizer": "optim",
    "resume": "resume_from_checkpoint",
    "wandb": "report_to",
}
USAGE = """\
Flags override the lines of --config FILE.yaml, which override the defaults below. FILE.yaml has lines
of `name: value`, as the config.yaml of any run. A switch is given as --name, --no_name or
--name True|False. None means no value. Hyphens within a flag are read as underscores.
"""


def layers(config_class: type, argv: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the values of the --config file, if one is given, then those of the flags, each by field name.

    --help prints the help and exits.

    Raises:
        UserError: a name is unknown, a value is missing or of the wrong type, or the file cannot be read.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        _print_help(config_class)
    kinds = kinds_of(config_class)
    flags = _split(argv, kinds | {"config": Kind(str)})
    if (path := flags.pop("config", None)) is not None:
        yield _convert_all(read_yaml(path, _StringLoader), kinds, f"{path}: ")
    yield _convert_all(flags, kinds, "--")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a field accepts: of type `one`; with `many`, tuples of these; with `optional`, also None."""

    one: Any  # str, int, float, bool, or a Literal of strings
    many: bool = False
    optional: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the field's flag needs no value."""
        return self.one is bool and not self.many

    def accepts(self, value: Any) -> bool:
        """Whether the field accepts `value`."""
        if value is None:
            return self.optional
        if self.many:
            return isinstance(value, tuple) and all(map(Kind(self.one).accepts, value))
        if choices := typing.get_args(self.one):
            return value in choices
        if isinstance(value, bool):
            return self.one is bool
        if self.one is float:
            return isinstance(value, (int, float)) and math.isfinite(value)
        return isinstance(value, self.one)

    def convert(self, word: Any) -> Any:
        """Convert `word` (a str, a list of them, or None) to a value; return it unchanged if that is impossible."""
        if self.many and isinstance(word, (str, list)):
            return tuple(map(Kind(self.one).convert, [word] if isinstance(word, str) else word))
        if not isinstance(word, str):
            return word
        if self.one is bool:
            return {"true": True, "false": False}.get(word.lower(), word)
        try:
            return self.one(word) if self.one in (int, float) else word
        except ValueError:
            return word

    def __str__(self) -> str:
        """A description of the accepted values."""
        names = {str: "a string", int: "a whole number", float: "a number", bool: "True or False"}
        words = names.get(self.one) or f"one of {', '.join(typing.get_args(self.one))}"
        return words + ", or several" * self.many + " or None" * self.optional


@functools.cache
def kinds_of(config_class: type) -> dict[str, Kind]:
    """The kind of each field.

    Raises:
        UserError: a field has a type that no `Kind` describes.
    """
    hints, found = typing.get_type_hints(config_class), {}
    for name in (field.name for field in dataclasses.fields(config_class)):
        if not (kind := _kind_of(hints[name])):
            raise UserError(
                f"{config_class.__name__}.{name}: a setting cannot have the type {hints[name]}: use str, int, float, "
                "bool, a Literal of strings, or a tuple[..., ...] of one of these, each alone or with | None"
            )
        found[name] = kind
    return found


def _kind_of(hint: Any) -> Kind | None:
    """The kind of a field with the type `hint`; None if a setting cannot have it."""
    origin = typing.get_origin(hint)
    inside = [each for each in typing.get_args(hint) if each is not types.NoneType]
    if origin in (types.UnionType, typing.Union) and len(inside) == 1:
        return (kind := _kind_of(inside[0])) and dataclasses.replace(kind, optional=True)
    if origin is tuple and inside[1:] == [...] and _kind_of(inside[0]) == Kind(inside[0]):
        return Kind(inside[0], many=True)
    strings = origin is Literal and all(isinstance(choice, str) for choice in inside)
    return Kind(hint) if strings or hint in (str, int, float, bool) else None


def read_yaml(path: str | Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            content = yaml.load(file, Loader=loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains no settings: write lines of `name: value`")
    return content


def write_yaml(values: Mapping[str, Any], path: str | Path, comment: str) -> None:
    """Write the line `comment`, then `values` in their order, so that --config PATH reads the same values."""
    text = yaml.dump(dict(values), Dumper=_StringDumper, sort_keys=False, allow_unicode=True, width=math.inf)
    replace_file(Path(path), f"{comment}\n{text}")


def _split(argv: Sequence[str], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Split `argv` into {name: string, or list of strings for a tuple}; None for the word None in optional fields.

    The last use of a repeated flag counts, so that flags appended to a command override earlier ones.
    """
    words: dict[str, list[str]] = {}
    takes = ""  # the flag to which the next word belongs
    for word in argv:
        if not word.startswith("--"):
            if not takes or (words[takes] and not kinds[takes].many):
                raise UserError(f"unexpected {word!r}: each value follows its flag, as in --seed 1")
            words[takes].append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        switch = name.removeprefix("no_")
        if name in kinds:
            words[name], takes = ([value], "") if equals else ([], name)
        elif switch in kinds and kinds[switch].is_switch and not equals:
            words[switch], takes = ["False"], ""
        else:
            raise UserError(f"unknown flag {flag}: {_suggestion(name, kinds, '--')}")

    result: dict[str, Any] = {}
    for name, given in words.items():
        kind = kinds[name]
        if not given and not kind.is_switch:
            raise UserError(f"--{name} has no value: expected {kind}")
        entered = given if kind.many else given[0] if given else "True"
        result[name] = None if kind.optional and given == ["None"] else entered
    return result


def _convert_all(words: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """Convert `words`, from flags or a file, to values; error messages begin with `where` and the name."""
    values = {}
    for name, word in words.items():
        if name not in kinds:
            raise UserError(f"{where}{name} is not a setting: {_suggestion(str(name), kinds)}")
        values[name] = kinds[name].convert(word)
        if not kinds[name].accepts(values[name]):
            raise UserError(f"{where}{name} {word!r}: expected {kinds[name]}")
    return values


def _suggestion(name: str, names: Mapping[str, Any], prefix: str = "") -> str:
    known = OTHER_NAMES.get(name)
    close = [known] if known in names else difflib.get_close_matches(name, names, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else "--help lists all settings"


class _StringLoader(yaml.SafeLoader):
    """Loads all values as strings or None, because YAML 1.1 reads 1e-3 as a string and `no` as False."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """As in the base class, but raise an error for a repeated key."""
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.constructor.ConstructorError(problem=f"{twice[0]} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _StringDumper(yaml.SafeDumper):
    """Writes strings so that `_StringLoader` reads the same: "None" in quotes, and rare line breaks escaped."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_NO_VALUE = ("tag:yaml.org,2002:null", re.compile("^(?:~|null|Null|NULL|None|)$"), ["~", "n", "N", ""])
_StringLoader.yaml_implicit_resolvers = {}
_StringLoader.add_implicit_resolver(*_NO_VALUE)
_StringDumper.add_implicit_resolver(*_NO_VALUE)
_StringDumper.add_representer(str, _StringDumper.represent_str)


def _print_help(config_class: type) -> typing.NoReturn:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise SystemExit(0)  # only one process prints the help
    try:
        from tyro import cli, conf

        print((sys.modules[config_class.__module__].__doc__ or "").strip(), USAGE, sep="\n\n")
        with suppress(SystemExit):
            cli(config_class, args=["--help"], description="", use_underscores=True, config=(conf.FlagConversionOff,))
        sys.stdout.flush()
    except ImportError:
        raise UserError("--help needs tyro, which is not installed: pip install tyro") from None
    except BrokenPipeError:  # `--help | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest, which Python writes at its exit
    raise SystemExit(0)
