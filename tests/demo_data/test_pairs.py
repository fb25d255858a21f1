"""The embedded pairs: functions are found, separated from their docstrings, and used once."""

from shared.demo_data import pairs

BODY = "    total = sum(values)\n    for value in values:\n        total -= value * len(values)\n    return total"


def function(name, text, body=BODY):
    return f'def {name}(values):\n    """{text}"""\n{body}\n'


def test_functions_and_methods_are_found_without_their_docstrings():
    source = '''
class A:
    """Class."""

    @property
    def method(self):
        """Docstring of the method.

            Indented.
        """
        def inner():
            """Stays in the source of the method."""
        return 1  # a comment stays

    async def waits(self): "on its only line"

if True:
    def only_documented():
        """Has no code."""
    def one(a,
            b):
        "In one line."
        return "é" + a
'''
    assert dict(pairs.functions(source.encode())) == {
        "Docstring of the method.\n\nIndented.": (
            'def method(self):\n    def inner():\n        """Stays in the source of the method."""\n'
            "    return 1  # a comment stays"
        ),
        "In one line.": 'def one(a,\n        b):\n    return "é" + a',
    }


def test_each_text_is_used_once_and_short_ones_are_left_out(tmp_path):
    texts = [
        f"Docstring {i}, which is long enough to be kept, because it has more than eighty characters." for i in range(3)
    ]
    code = {
        "a.py": function("first", texts[0]) + function("second", texts[1]),
        "b.py": function("first", texts[2]) + function("third", texts[1]),  # a source and a docstring of a.py
        "c.py": function("fourth", "Too short.") + function("fifth", texts[0] + " x", "    return values"),
    }
    (tmp_path / "lib").mkdir()
    for name, content in code.items():
        (tmp_path / "lib" / name).write_text(content)
    rows = pairs.gather({"lib": tmp_path / "lib"})
    anchors, sources = ([row[name] for row in rows] for name in ("anchor", "positive"))
    assert len(set(anchors)) == len(set(sources)) == len(rows) == 2
    assert set(anchors) <= set(texts)
    assert all("Docstring" not in source and source.startswith("def ") for source in sources)
