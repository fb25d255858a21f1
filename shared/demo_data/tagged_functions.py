"""The default tagged texts: functions of installed Python libraries, with the role of each name as its tag.

The words are the tokens of a function, without comments and docstring. The tags are IOB2: what a name refers to is a
class, a function, an argument, an attribute or a module; all other words, such as local variables, have the tag O.
"""

from __future__ import annotations

import ast
import builtins
import io
import token
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.demo_data import libraries
from shared.demo_data.libraries import Function

if TYPE_CHECKING:
    import pyarrow as pa

FILES_PER_LIBRARY = 80
MAX_BYTES = 100_000  # of a file; larger ones are mostly tables
MIN_WORDS, MAX_WORDS = 20, 200  # of a function; further words are cut off
MOST_TEXTS = {"train": 2400, "validation": 480}
STRING = '""'  # the word for any string
SKIPPED = {token.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.COMMENT, token.ENCODING, token.ENDMARKER}
FSTRING_START, FSTRING_END = (getattr(token, f"FSTRING_{end}", -1) for end in ("START", "END"))  # from Python 3.12 on

Place = tuple[int, int]  # line from 1, column from 0


def load() -> tuple[pa.Table, pa.Table]:
    """Training and validation tables with the columns tokens and tags (lists of strings) and file.

    A text is a function, cut after MAX_WORDS words. All functions of a source file are in the same table.

    Raises:
        UserError: one of the libraries is not installed.
    """
    return libraries.in_splits(libraries.cached_table("sources", gather))


def gather(roots: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The tagged functions in each library's source folder: rows of tokens, tags, file and split, in a random order.

    Functions with the same words are duplicates: one of them is kept.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, functions in libraries.parsed(roots, tagged_functions, FILES_PER_LIBRARY):
        for words, tags in functions:
            row = {"tokens": words, "tags": tags, "file": name, "split": libraries.split_of(name)}
            found.setdefault(" ".join(words), row)
    rows = []
    counts: Counter[str] = Counter()
    for text in sorted(found, key=lambda text: (libraries.uniform_hash("order", text), text)):
        split = found[text]["split"]
        counts[split] += 1
        if counts[split] <= MOST_TEXTS[split]:
            rows.append(found[text])
    return rows


def tagged_functions(source: bytes) -> list[tuple[list[str], list[str]]]:
    """(words, tags) of the functions of a Python file, except functions in functions and short ones.

    A file that is large or cannot be parsed has none, and neither has one that is not ASCII, in which `ast` and
    `tokenize` count columns differently.
    """
    if len(source) > MAX_BYTES or not source.isascii():
        return []
    found = [*libraries.definitions(source, in_functions=False)]
    try:
        words, roles = list(_words(source)), Roles(ast.parse(source)).places
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return []
    functions = []
    places = [place for _, place in words]
    for function in sorted((node for node in found if isinstance(node, Function)), key=_extent):
        first, end = (bisect_left(places, place) for place in _extent(function))
        inside = words[first:end]
        if ast.get_docstring(function, clean=False) is not None:
            begin, end_of_text = _extent(function.body[0])
            inside = [(word, place) for word, place in inside if not begin <= place < end_of_text]
        if len(inside) >= MIN_WORDS:
            kept = inside[:MAX_WORDS]
            functions.append(([word for word, _ in kept], _iob2(kept, roles)))
    return functions


def _extent(node: ast.stmt) -> tuple[Place, Place]:
    """The places where a statement begins and where it ends."""
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _words(source: bytes) -> Iterator[tuple[str, Place]]:
    """Yield the tokens of a source and their places. Each string is the word STRING, also an f-string with values."""
    depth = 0
    for kind, text, place, _, _ in tokenize.tokenize(io.BytesIO(source).readline):
        if kind == FSTRING_START:
            depth += 1
            if depth == 1:
                yield STRING, place
        elif kind == FSTRING_END:
            depth -= 1
        elif depth == 0 and kind not in SKIPPED:
            yield (STRING if kind == token.STRING else text), place


def _iob2(words: list[tuple[str, Place]], roles: Mapping[Place, str]) -> list[str]:
    """The tags of words with roles. Modules or attributes that dots join, such as os.path, are one entity."""
    here = [roles.get(place) for _, place in words]
    after_definition = {"def": "function", "class": "class"}
    for i in range(1, len(words)):
        here[i] = after_definition.get(words[i - 1][0], here[i])  # `ast` does not have the places of these names
    tags = [f"B-{role}" if role else "O" for role in here]
    for i in range(1, len(words) - 1):
        if words[i][0] == "." and here[i - 1] == here[i + 1] and here[i - 1] in ("attribute", "module"):
            tags[i] = tags[i + 1] = f"I-{here[i + 1]}"
    return tags


class Roles(ast.NodeVisitor):
    """Finds what the names of a module refer to: `places` has the role of a name by its place.

    A name in an f-string has none.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.places: dict[Place, str] = {}
        self.of_module = _roles_of_module(tree)
        self.of_functions: dict[str, str | None] = {}  # roles of the names of the functions around the current node
        self.visit(tree)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """An f-string is one word."""

    def visit_Name(self, node: ast.Name) -> None:
        """Arguments and variables of functions hide the names of the module, which hide builtins."""
        if node.id in self.of_functions:
            role = self.of_functions[node.id]
        elif node.id in self.of_module:
            role = self.of_module[node.id]
        else:
            known = getattr(builtins, node.id, None)
            role = "class" if isinstance(known, type) else "function" if callable(known) else None
        self.note(node.lineno, node.col_offset, role)

    def visit_Attribute(self, node: ast.Attribute, usual: str = "attribute") -> None:
        """The role is `usual`, except for names of classes."""
        role = "class" if _is_capitalized(node.attr) else usual
        self.note(node.end_lineno or 0, (node.end_col_offset or 0) - len(node.attr), role)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """An attribute that is called is a function."""
        if isinstance(node.func, ast.Attribute):
            self.visit_Attribute(node.func, usual="function")
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_arg(self, node: ast.arg | ast.keyword) -> None:
        """An argument of a function, or one that a call names."""
        if node.arg:  # a call's **arguments have no name
            self.note(node.lineno, node.col_offset, "argument")
        self.generic_visit(node)

    visit_keyword = visit_arg

    def visit_Import(self, node: ast.Import) -> None:
        """Each part of a dotted name is a module."""
        for alias in node.names:
            self.note_path(alias.lineno, alias.col_offset, alias.name)
            self.note_other_name(alias, "module")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """What is imported has the role that its uses show."""
        self.note_path(node.lineno, node.col_offset + len("from ") + node.level, node.module or "")
        for alias in node.names:
            role = self.of_module.get(alias.asname or alias.name)
            self.note(alias.lineno, alias.col_offset, role)
            self.note_other_name(alias, role)

    def visit_FunctionDef(self, node: Function | ast.Lambda) -> None:
        """Decorators, defaults and annotations are outside of the function's own names."""
        inside = {child for child in ast.walk(node) if child is not node}
        own: dict[str, str | None] = {
            child.id: None for child in inside if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load)
        }
        own |= {child.name: "function" for child in inside if isinstance(child, Function)}
        given = node.args
        every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        own |= {argument.arg: "argument" for argument in every if argument}
        body = node.body if isinstance(node.body, list) else [node.body]
        for child in ast.iter_child_nodes(node):
            if child not in body:
                self.visit(child)
        outside, self.of_functions = self.of_functions, {**self.of_functions, **own}
        for child in body:
            self.visit(child)
        self.of_functions = outside

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def note(self, line: int, column: int, role: str | None) -> None:
        """Note the role of the name at a place."""
        if role:
            self.places[line, column] = role

    def note_path(self, line: int, column: int, path: str) -> None:
        """Note that each part of a dotted name is a module."""
        for part in path.split("."):
            self.note(line, column, "module")
            column += len(part) + 1

    def note_other_name(self, alias: ast.alias, role: str | None) -> None:
        """Note the role of the name after `as`."""
        if alias.asname:
            self.note(alias.end_lineno or 0, (alias.end_col_offset or 0) - len(alias.asname), role)


def _roles_of_module(tree: ast.Module) -> dict[str, str]:
    """The roles of the names that a module imports or defines; what another module defines is guessed from its use."""
    nodes = list(ast.walk(tree))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    roles: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            roles |= {alias.asname or alias.name.partition(".")[0]: "module" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for name in (alias.asname or alias.name for alias in node.names):
                if _is_capitalized(name):
                    roles[name] = "class"
                elif name in called or (name in owners and not name.isupper()):
                    roles[name] = "function" if name in called else "module"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            roles[node.name] = "class" if isinstance(node, ast.ClassDef) else "function"
    return roles


def _is_capitalized(name: str) -> bool:
    """Whether a name is written like that of a class, such as Tensor or _LRScheduler."""
    bare = name.lstrip("_")
    return bare[:1].isupper() and not bare.isupper()
