"""Tables from files, saved data sets and the Hub, with their training and validation parts."""

import shutil
import socket
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from huggingface_hub import constants
from table_files import class_labels, load, table_of, values, write

from shared.datasets.labels import Labels
from shared.datasets.rows import missing, source_of, where
from shared.datasets.tables import read_hub, read_parts, read_saved, skip_incomplete, split
from shared.demo_data import texts as demo_texts
from shared.errors import UserError
from shared.extras import hub
from shared.options.data_options import DataOptions


def test_without_flags_the_embedded_docstrings_are_loaded(monkeypatch):
    parts = (pa.table({"text": ["a"], "label": ["x"], "file": ["f"]}), pa.table({"text": ["b"], "label": ["y"]}))
    monkeypatch.setattr(demo_texts, "load", lambda: parts)
    train, validation = load()
    assert (train["text"].to_pylist(), validation["text"].to_pylist()) == (["a"], ["b"])
    assert where(validation, 0) == "row 1 of the embedded docstrings"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_a_validation_file_rows_are_held_out_and_one_process_prints_it(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    path = write(tmp_path / "a.csv", "x\n" + "\n".join(map(str, range(40))))
    train, validation = load(train_file=str(path), seed=3)
    assert (train.num_rows, validation.num_rows) == (36, 4)
    message = f"--train_file {path} has no validation data: 4 of its rows (10 %, chosen by --seed 3) are held out\n"
    assert capsys.readouterr().err == (message if rank == "0" else "")
    other = write(tmp_path / "b.jsonl", '{"x": 2}\n')
    train, validation = load(train_file=path, validation_file=other)
    assert (train.num_rows, values(validation)) == (40, [{"x": 2}])
    assert where(validation, 0) == f"row 1 of --validation_file {other}"


def test_validation_files_that_training_files_include_are_refused(tmp_path):
    first, second, hidden = (str(write(tmp_path / name, "x\n1\n2\n")) for name in ("a.csv", "b.csv", "_c.csv"))
    for names in (tmp_path, f"{tmp_path}/[ab].csv", (first, second)):
        refused = runs.refusal(load, train_file=names, validation_file=second)
        assert refused.startswith(f"--validation_file {second} is also a file of --train_file, so its rows are learned")
    load(train_file=tmp_path, validation_file=hidden)  # which is not read from a folder
    (tmp_path / "deeper").mkdir()  # which is not read by a pattern
    load(train_file=f"{tmp_path}/[abd]*", validation_file=write(tmp_path / "deeper/d.csv", "x\n1\n"))
    assert "File name too long" in runs.refusal(load, train_file="a" * 252 + ".csv")
    load(train_file=(first, second), validation_file=(second, first))


# Folders of save_to_disk and the Hub, which need the package datasets


def saved_splits(folder, **splits):
    """Write a save_to_disk folder; `splits` gives the number of rows of each split, or their labels."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    parts = {}
    for name, labels in splits.items():
        ids = [i % 2 for i in range(labels)] if isinstance(labels, int) else labels
        rows = {"text": [f"{name} {i}" for i in range(len(ids))], "label": ids}
        parts[name] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(folder)
    return str(folder)


def test_a_saved_dataset_is_read_in_its_order_with_its_label_names_and_refused_if_it_was_cut_off(tmp_path):
    folder = saved_splits(tmp_path / "all", train=10)
    datasets.load_from_disk(folder)["train"].select([3, 1, 2]).save_to_disk(tmp_path / "one")
    table = read_saved(str(tmp_path / "one"))["train"]
    assert table["text"].to_pylist() == ["train 3", "train 1", "train 2"]
    assert b'"names": ["no", "yes"]' in table.schema.metadata[b"huggingface"]
    assert source_of(table) == f"--dataset_name {tmp_path / 'one'} (split train)"
    for path in (tmp_path / "one").glob("*.arrow"):
        path.write_bytes(path.read_bytes()[:40])
    assert "save_to_disk" in runs.refusal(read_saved, str(tmp_path / "one"))


def test_what_is_no_data_set_is_refused_and_a_missing_folder_is_not_taken_as_a_hub_name(tmp_path):
    saved = saved_splits(tmp_path / "saved", test=2)
    missing = ("./gone", "/gone/folder", "~/gone", "out/some/folder")
    for name, config, expected in (
        (saved, None, r"has no split train with rows \(splits: test\)"),
        (tmp_path, None, "--dataset_name .* should be one that save_to_disk of datasets wrote"),
        (saved, "mrpc", "--dataset_config_name mrpc"),
        (write(tmp_path / "a.csv", "x\n1\n"), None, "use it as --train_file"),
        *((name, None, f"--dataset_name {name}: no such folder") for name in missing),
    ):
        with pytest.raises(UserError, match=expected):
            load(dataset_name=str(name), dataset_config_name=config)


def test_a_dataset_that_was_loaded_before_needs_no_network_and_another_suggests_the_embedded_data(
    monkeypatch, tmp_path
):
    """The Hub is at a closed port, and a call of its client fails the test."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it would try again for 24 s"))
    with pytest.raises(UserError, match=r"--dataset_name a/b --dataset_config_name c is .*remove --dataset_name"):
        read_hub("a/b", "c")

    class Tiny(datasets.ArrowBasedBuilder):
        def _info(self):
            return datasets.DatasetInfo()

        def _split_generators(self, _dl_manager):
            return [datasets.SplitGenerator("train", {"count": 4}), datasets.SplitGenerator("validation", {"count": 2})]

        def _generate_tables(self, count):
            yield 0, pa.table({"text": [self.config.name] * count})

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    for config in ("other", "default"):  # first the only one in the cache
        Tiny(str(tmp_path), "tiny", config, hash="abc", repo_id="someone/tiny").download_and_prepare()
        train, validation = load(dataset_name="someone/tiny")
        assert [part["text"].to_pylist() for part in (train, validation)] == [[config] * 4, [config] * 2]
        assert where(train, 1) == "row 2 of --dataset_name someone/tiny (split train)"
    shutil.rmtree(tmp_path / "someone___tiny/default")
    monkeypatch.setattr(hub, "unreachable", lambda _: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given: {given: datasets.Dataset.from_dict({})})
    assert [*read_hub("someone/tiny", None)] == [("someone/tiny", None)], "which config is the default one"


USUAL = ["valid", "dev", "Validation", "dev_matched"]


@pytest.mark.parametrize(
    ("splits", "used", "said"),
    [
        *(({"Train": 10, "test": 3, name: 2}, name, f"split {name} is used as validation data\n") for name in USUAL),
        ({"train": 10, "test": 3}, "test", "its split test is used as validation data: a model that is"),
        ({"train": 20, "test": [-1] * 5}, "train", "its split test has no labels, so it cannot replace it"),
        ({"train": 10, "extra": 4, "held": 3}, "train", "(extra, held): --validation_split_name selects one"),
        ({"train": 4, "validation": 2, "extra": 0}, "validation", "its split validation is used"),
    ],
)
def test_the_validation_rows_are_a_split_with_a_usual_name_or_held_out_with_a_message(
    tmp_path, capfd, splits, used, said
):
    train, validation = load(dataset_name=saved_splits(tmp_path / "a", **splits))
    assert {text.split()[0].lower() for text in train["text"].to_pylist()} == {"train"}
    assert {text.split()[0] for text in validation["text"].to_pylist()} == {used}
    assert validation.num_rows == (splits[used] if used != "train" else max(1, splits[used] // 10))
    assert said in capfd.readouterr().err


def test_splits_can_be_selected_by_name_and_messages_list_the_existing_ones(tmp_path):
    folder = saved_splits(tmp_path / "a", train=10, extra=4, held=3, none=0)
    train, validation = load(dataset_name=folder, train_split_name="extra", validation_split_name="held")
    assert (source_of(train), validation.num_rows) == (f"--dataset_name {folder} (split extra)", 3)
    for flags, expected in (
        ({"train_split_name": "trian"}, r"has no split trian with rows \(splits: train, extra, held"),
        ({"validation_split_name": "train"}, "--validation_split_name train is the training split"),
        ({"validation_split_name": "none"}, "has no split none with rows .*: select another with"),
    ):
        with pytest.raises(UserError, match=expected):
            load(dataset_name=folder, **flags)


def test_incomplete_rows_are_skipped_on_request_and_counted(tmp_path, capsys):
    path = write(tmp_path / "a.csv", "text,label\na,1\n ,2\nb,NA\nc,2\nNA,1\n,\n")
    train, _ = load(train_file=path, validation_file=path, skip_incomplete_rows=True)
    assert train["text"].to_pylist() == ["a", "c", "NA"]
    assert Labels.from_table(train, "label").encode(train).tolist() == [0, 1, 0]
    assert where(train, 1) == f"row 4 of --train_file {path}"
    assert f"3 of 6 rows of --train_file {path} are skipped (no value in text or label)" in capsys.readouterr().err
    rows = pa.table({"text": ["a", None, "c"], "label": [0.5, 1.0, float("nan")], "x": [["a"], None, []]})
    pq.write_table(rows, tmp_path / "a.parquet")
    parquet = {"train_file": tmp_path / "a.parquet", "validation_file": tmp_path / "a.parquet"}
    assert load(**parquet, skip_incomplete_rows=True)[0].num_rows == 1
    assert load(("x",), "text", **parquet, skip_incomplete_rows=True)[0].num_rows == 2
    several = class_labels(table_of([[0], [], [0, -1]]), ["p", "q"], {"_type": "List"})
    for lists in (several, table_of([["a"], [], ["b", " "]]), table_of([[1.0], [], [0.0, float("nan")]])):
        assert missing(lists, "label", of_values=True).tolist() == [False, False, True]
        assert skip_incomplete(lists, [], ["label"]).num_rows == 2
    assert skip_incomplete(table_of([["a"], ["a", ""]]), ["label"]).num_rows == 2  # a word without text is a word
    delimited = SimpleNamespace(
        **vars(DataOptions(train_file=(str(path),), skip_incomplete_rows=True)), label_delimiter="|"
    )
    assert read_parts(delimited, ["text"], ["label"])[0]["label"].to_pylist() == ["1", "NA", "2", "1"]
    write(path, "text,label\n,1\n,2\n")
    with pytest.raises(UserError, match=r"--skip_incomplete_rows: 2 of 2 rows .* so no row is left"):
        load(train_file=path, validation_file=path, skip_incomplete_rows=True)


def test_a_limit_keeps_rows_that_the_seed_chooses_from_each_part(tmp_path, capsys):
    path = write(tmp_path / "a.csv", "text,label\n" + "".join(f"text {i},{i // 50}\n" for i in range(100)))
    full = load(train_file=path)
    parts = split(full, DataOptions(max_train_samples=30, max_eval_samples=4))
    for part, whole, count in zip(parts, full, (30, 4), strict=True):
        chosen = part["text"].to_pylist()
        assert (len(chosen), len({*chosen} - {*whole["text"].to_pylist()})) == (count, 0)
        assert where(part, 2) == f"row {int(chosen[2][5:]) + 1} of --train_file {path}"
    again, other = (split(full, DataOptions(max_train_samples=30, seed=seed))[0] for seed in (0, 1))
    assert again["text"] == parts[0]["text"] != other["text"]
    assert split(full, DataOptions(max_train_samples=91)) == full
    assert "--max_train_samples 91: there are only 90 rows, and all of them are used" in capsys.readouterr().err
