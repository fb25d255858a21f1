"""The installed datasets has the undocumented interfaces that we use."""

import datasets
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from shared.compat import of_datasets

DATASETS = f"datasets {datasets.__version__}"


@pytest.mark.parametrize("rows", [[], [1, 2]])
def test_a_saved_data_set_is_read_also_without_rows(tmp_path, rows):
    Dataset.from_dict({"a": rows}).save_to_disk(tmp_path)
    found = of_datasets.load_saved(tmp_path)
    assert len(found) == len(rows), f"{DATASETS}: state.json has no _data_files; used to read an empty split"


def test_a_class_label_is_recognized_in_the_metadata_of_a_table():
    features = Features({"label": ClassLabel(names=["no", "yes"]), "size": Value("int64")})
    table = Dataset.from_dict({"label": [0, 1], "size": [3, 4]}, features=features).with_format("arrow")[:]
    found = {name: of_datasets.class_names(table, name) for name in table.column_names}
    assert found == {"label": ("no", "yes"), "size": ()}, f"{DATASETS}: the metadata describes a ClassLabel differently"
    assert of_datasets.class_names(pa.table({"label": [0, 1]}), "label") == ()
