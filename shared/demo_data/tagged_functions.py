"""The default tagged texts: functions of five Python libraries, with the role of each name as its tag.

The words are the tokens of a function, without comments and docstring. The tags are IOB2: what a name refers to is a
class, a function, an argument, an attribute or a module; all other words, such as local variables, have the tag O.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def load() -> list[pa.Table]:
    """Training and validation tables with the columns tokens and tags (lists of strings) and file.

    A text is a function, cut after 200 words. All functions of a source file are in the same table, and no text occurs
    twice.
    """
    file, columns = Path(__file__).with_suffix(".parquet"), ["tokens", "tags", "file"]
    parts = ("train", "validation")
    return [pq.read_table(file, columns=columns, filters=[("split", "==", part)]) for part in parts]
