"""`python -m shared.prepare` leaves nothing to prepare for the training run, and refuses bad input in one line."""

import re

import pytest
import runs
from toy_data import tagged_rows, write_tagged

from shared import prepare
from shared.config import options
from shared.text import token_files

MLM = runs.ROOT / "recipes/mlm.py"
LINES = [f"document {i} of some, and it has {i % 7} words of no use" for i in range(200)]


@pytest.fixture(autouse=True)
def one_thread(own_cache, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def flags(tmp_path):
    """Flags of recipes/mlm.py with a corpus of two files."""
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"corpus/{name}.txt").write_text("".join(f"{name} {line}\n" for line in LINES))
    return ["--train_file", f"{tmp_path}/corpus/*.txt", "--vocab_size", "300", "--output_dir", str(tmp_path / "run")]


def test_training_with_the_same_flags_prepares_nothing(flags, tmp_path, monkeypatch, capsys):
    prepare.prepare(MLM, flags, (0, 1))
    out = capsys.readouterr().out
    assert re.search(r"^training +360 samples, [\d,]+ tokens", out, re.MULTILINE)
    assert re.search(r"^validation +40 samples, [\d,]+ tokens", out, re.MULTILINE)
    assert re.search(r"^time +[\d.]+ s$", out, re.MULTILINE)
    assert not (tmp_path / "run").exists()
    runs.forbid_preparing(monkeypatch)
    mlm = runs.load_recipe("mlm")
    train, held_out, _ = mlm.load_data(options.parse(mlm.Config, flags))
    assert (len(train), len(held_out)) == (360, 40)


def test_a_pattern_without_files_ends_all_processes_with_one_line(flags, tmp_path):
    flags[1] = f"{tmp_path}/*.jsonl.zst"
    codes, output = runs.run_forked(2, "shared/prepare.py", [MLM, *flags], tmp_path)
    assert codes == [2, 2], output
    assert re.findall("error|Traceback", output) == ["error"]
    assert f"error: --train_file {flags[1]}: no such file (" in output


@pytest.mark.parametrize(
    ("recipe", "more", "left", "rows"),
    [
        ("nlp", [], ["4 of 8", "1 of 2"], 160),
        ("embeddings", ["--text_column_names", "text", "label"], ["4 of 8", "4 of 8", "1 of 2", "1 of 2"], 160),
        ("mlm", [], ["4 of 8", "1 of 2"], 260),
        ("token_classification", [], ["2 of 4", "1 of 2"], r"[0-9]+"),
    ],
)
def test_the_tasks_of_an_array_tokenize_the_texts_together(
    texts, tmp_path, monkeypatch, capsys, recipe, more, left, rows
):
    monkeypatch.setattr("shared.text.tokenized.BLOCK_ROWS", 20)
    monkeypatch.setattr(token_files, "BLOCK_ROWS", 20)
    monkeypatch.setattr("shared.tagging.pieces.SMALLEST_BLOCK", 20)
    given = write_tagged(tmp_path, tagged_rows()) if recipe == "token_classification" else texts
    flags = [*map(str, given), *runs.TINY, *more]
    path = runs.ROOT / f"recipes/{recipe}.py"
    prepare.prepare(path, flags, (0, 2))
    captured = capsys.readouterr()
    assert re.findall(r"(\d+ of \d+) parts are left to other tasks", captured.err) == left
    assert re.search(r"--shard 0/2: prepared in \d+ s; tokenizing .* parts are left to other", captured.err)
    assert captured.out == ""
    prepare.prepare(path, flags, (1, 2))
    assert re.search(rf"^training +{rows} samples, [\d,]+ tokens", capsys.readouterr().out, re.MULTILINE)
    runs.forbid_preparing(monkeypatch)
    prepare.prepare(path, flags, (0, 1))


@pytest.mark.parametrize("shard", ["4/4", "x"])
def test_a_wrong_task_is_refused(shard, capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare.main(["--shard", shard, str(MLM)])
    assert "error: argument --shard: " in capsys.readouterr().err
