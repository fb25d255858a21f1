"""A flag and a line of YAML have the same meaning; an error in either is one line that names it."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import runs

from shared.config import command_line
from shared.errors import UserError


@dataclasses.dataclass
class Fields:
    """One field of every type a Config may have."""

    text: str = "plain"
    """A text."""
    name: str | None = "default"
    """A text or nothing."""
    count: int = 1
    """A whole number."""
    limit: int | None = None
    """A whole number or nothing."""
    rate: float = 0.5
    """A number."""
    switch: bool = False
    """A switch."""
    tri: bool | None = None
    """A switch that can be undecided."""
    no_op: bool = True
    """A switch whose name begins like a negation."""
    choice: Literal["no", "fp16"] = "no"
    """One of two."""
    columns: tuple[str, ...] = ("a", "b")
    """Texts."""
    sizes: tuple[int, ...] | None = None
    """Whole numbers."""


@pytest.mark.parametrize("kind", [str | int, Literal[1, 2], list[str], tuple[str, int], tuple[int | None, ...]])
def test_a_field_of_another_type_is_named_with_the_types_that_a_setting_may_have(kind):
    config = dataclasses.make_dataclass("Config", [("size", kind, "auto")])
    with pytest.raises(UserError, match=r"Config\.size: a setting cannot have the type .*: use str, int"):
        list(command_line.layers(config, []))


def from_flags(*argv: str) -> dict[str, Any]:
    (values,) = command_line.layers(Fields, argv)
    return values


def from_yaml(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    values, _ = command_line.layers(Fields, ["--config", str(path)])
    return values


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--rate", "1e-3"], {"rate": 0.001}),
        (["--count", "-1"], {"count": -1}),
        (["--limit", "None"], {"limit": None}),
        (["--text", "None"], {"text": "None"}),  # the field is not optional, so None is a text
        (["--name", "None"], {"name": None}),
        (["--text=--odd=one"], {"text": "--odd=one"}),
        (["--text", "-dash"], {"text": "-dash"}),
        (["--switch"], {"switch": True}),
        (["--switch=false"], {"switch": False}),
        (["--no_switch"], {"switch": False}),
        (["--no-switch", "--count", "2"], {"switch": False, "count": 2}),
        (["--no_no_op"], {"no_op": False}),
        (["--tri", "None"], {"tri": None}),
        (["--columns", "x", "-y", "--count", "2"], {"columns": ("x", "-y"), "count": 2}),
        (["--sizes", "None"], {"sizes": None}),
        (["--count", "1", "--count", "2"], {"count": 2}),
    ],
)
def test_flags_become_values(argv: list[str], values: dict[str, Any]) -> None:
    assert from_flags(*argv) == values
    assert [type(value) for value in from_flags(*argv).values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rate: 1e-3", {"rate": 0.001}),  # YAML 1.1 reads this as a text
        ("choice: no", {"choice": "no"}),  # ... and this for False
        ("text: 0123", {"text": "0123"}),  # ... and this for 83
        ("switch: True\ntri: false", {"switch": True, "tri": False}),
        ("name: null\nlimit: ~\nsizes:", {"name": None, "limit": None, "sizes": None}),
        ("name: 'None'", {"name": "None"}),
        ("columns: []", {"columns": ()}),
        ("columns: x", {"columns": ("x",)}),
        ("sizes:\n- 1\n- 2", {"sizes": (1, 2)}),
        ("# only this\ncount: 3  # and that", {"count": 3}),
    ],
)
def test_lines_of_yaml_become_the_same_values(tmp_path: Path, text: str, values: dict[str, Any]) -> None:
    assert from_yaml(tmp_path, text) == values


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cuont", "3"], "unknown flag --cuont: did you mean --count?"),
        (["--no_switch=True"], "unknown flag --no_switch: did you mean --switch?"),
        (["--zzz"], "unknown flag --zzz: --help lists all settings"),
        (["stray"], "unexpected 'stray': each value follows its flag, as in --seed 1"),
        (["--count", "1", "2"], "unexpected '2': each value follows its flag, as in --seed 1"),
        (["--no_switch", "True"], "unexpected 'True': each value follows its flag, as in --seed 1"),
        (["--count"], "--count has no value: expected a whole number"),
        (["--columns", "--count", "1"], "--columns has no value: expected a string, or several"),
        (["--count", "1.5"], "--count '1.5': expected a whole number"),
        (["--limit", "few"], "--limit 'few': expected a whole number or None"),
        (["--rate", "nan"], "--rate 'nan': expected a number"),
        (["--switch", "maybe"], "--switch 'maybe': expected True or False"),
        (["--choice", "fp8"], "--choice 'fp8': expected one of no, fp16"),
        (["--sizes", "1", "b"], "--sizes ['1', 'b']: expected a whole number, or several or None"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(argv: list[str], message: str) -> None:
    assert runs.refusal(from_flags, *argv) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont: 3", "run.yaml: cuont is not a setting: did you mean count?"),
        ("config: other.yaml", "run.yaml: config is not a setting: --help lists all settings"),
        ("count: few", "run.yaml: count 'few': expected a whole number"),
        ("text: [a]", "run.yaml: text ['a']: expected a string"),
        ("columns: [a, null]", "run.yaml: columns ['a', None]: expected a string, or several"),
        ("switch: yes", "run.yaml: switch 'yes': expected True or False"),
        ("", "run.yaml: contains no settings: write lines of `name: value`"),
        (
            "count: 1\ncount: 2",
            'run.yaml: cannot be read as YAML: count is given twice in "run.yaml", line 1, column 1',
        ),
        ("count: 1\n rate: [", "run.yaml: cannot be read as YAML: mapping values are not allowed here in"),
        ("text: !!python/name:os.system", "run.yaml: cannot be read as YAML: could not determine a constructor"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert runs.refusal(from_yaml, tmp_path, text).replace(f"{tmp_path}/", "").startswith(message)


def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in [
        ("absent.yaml", "cannot be read as YAML: [Errno 2] No such file or directory"),
        ("", "cannot be read as YAML: [Errno 21] Is a directory"),
        ("binary", "cannot be read as YAML: 'utf-8' codec can't decode"),
    ]:
        found = runs.refusal(list, command_line.layers(Fields, ["--config", str(tmp_path / name)]))
        assert found.startswith(f"{tmp_path / name}: {reason}")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_process_shows_every_field_with_its_docstring_and_default_and_all_exit_with_0(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        from_flags("--count", "3", "--help")
    assert not end.value.code
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    if rank == "1":
        assert not words
        return
    assert "--config FILE.yaml" in words
    assert "--name, --no_name or --name True|False" in words
    assert "--rate FLOAT A number. (default: 0.5)" in words
    assert "--choice {no,fp16} One of two. (default: no)" in words
    assert "--columns [STR [STR ...]] Texts. (default: a b)" in words
    for field in dataclasses.fields(Fields):
        assert f"--{field.name} " in words


def test_help_ends_quietly_if_its_reader_has_read_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    incoming, outgoing = os.pipe()
    os.close(incoming)
    monkeypatch.setattr(sys, "stdout", os.fdopen(outgoing, "w"))
    with sys.stdout, pytest.raises(SystemExit, match=r"^0$"):
        from_flags("--help")


def test_flags_work_without_tyro_and_help_names_it_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert from_flags("--count", "3") == {"count": 3}
    assert runs.refusal(from_flags, "--help") == "--help needs tyro, which is not installed: pip install tyro"
