"""The embedded tagged texts: the roles of names in Python functions."""

import textwrap

import pyarrow as pa

from shared.demo_data import libraries, tagged_functions

SOURCE = '''
"""A module."""
import os.path as files
import numpy
from base import Base, helper, CONSTANT, other


class Child(Base):
    @numpy.vectorize
    def method(self, *rows: list, axis=0) -> "Child":
        """A docstring, which is not part of the text."""
        import scipy.linalg
        total = helper(rows, axis=axis)  # a comment
        inner = [row.shape.first for row in rows if isinstance(row, Child)]
        return files.join(self.config.names.all, f"{total}", other.Thing(CONSTANT), len(inner))


async def outer(first):
    def nested(second):
        return first + second
    return await nested(lambda third: third + numpy.pi)


def short():
    pass
'''


def tagged(source):
    """The words with a tag other than O of each function, as "word/tag word/tag ..."."""
    found = tagged_functions.tagged_functions(textwrap.dedent(source).encode())
    return [" ".join(f"{w}/{t}" for w, t in zip(words, tags, strict=True) if t != "O") for words, tags in found]


def test_each_name_has_the_role_of_what_it_refers_to(monkeypatch):
    monkeypatch.setattr(tagged_functions, "MIN_WORDS", 7)  # "short" has six
    method, outer = tagged(SOURCE)
    assert method.split() == [
        *("method/B-function", "self/B-argument", "rows/B-argument", "list/B-class", "axis/B-argument"),
        *("scipy/B-module", "./I-module", "linalg/I-module"),
        *("helper/B-function", "rows/B-argument", "axis/B-argument", "axis/B-argument"),
        *("shape/B-attribute", "./I-attribute", "first/I-attribute", "rows/B-argument"),
        *("isinstance/B-function", "Child/B-class"),
        *("files/B-module", "join/B-function", "self/B-argument"),
        *("config/B-attribute", "./I-attribute", "names/I-attribute", "./I-attribute", "all/I-attribute"),
        *("other/B-module", "Thing/B-class", "len/B-function"),
    ]
    assert outer.split() == [
        *("outer/B-function", "first/B-argument", "nested/B-function", "second/B-argument", "first/B-argument"),
        *("second/B-argument", "nested/B-function", "third/B-argument", "third/B-argument"),
        *("numpy/B-module", "pi/B-attribute"),
    ]


def test_comments_docstrings_and_the_content_of_strings_are_left_out():
    words, tags = tagged_functions.tagged_functions(SOURCE.encode())[0]
    text = " ".join(words)
    assert len(words) == len(tags)
    assert text.startswith(
        'def method ( self , * rows : list , axis = 0 ) -> "" : import scipy . linalg total = helper'
    )
    assert "comment" not in text
    assert words.count('""') == 2
    assert tagged_functions.tagged_functions(SOURCE.replace("comment", "é").encode()) == []  # it is not ASCII


def test_all_functions_of_a_file_are_in_the_same_table_and_duplicates_are_kept_once(tmp_path):
    body = "return " + " + ".join(10 * ["x"])
    for number in range(30):
        functions = [f"def f{number}_{i}(x):\n    {body}\n" for i in range(2)]
        (tmp_path / f"m{number}.py").write_text("\n".join([*functions, f"def same(x):\n    {body}\n"]))
    rows = tagged_functions.gather({"planted": tmp_path})
    parts = libraries.in_splits(pa.Table.from_pylist(rows))
    files = [set(part["file"].to_pylist()) for part in parts]
    assert not files[0] & files[1]
    assert min(map(len, files)) > 0
    texts = [" ".join(words) for part in parts for words in part["tokens"].to_pylist()]
    assert len(texts) == len(set(texts)) == 61
    assert tagged_functions.gather({"planted": tmp_path}) == rows
