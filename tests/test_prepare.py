"""`python -m shared.prepare` leaves nothing to prepare for the training run, and refuses bad input in one line."""

import re

import pytest
import runs
from toy_data import tagged_rows, write_tagged

from shared import prepare

MLM = runs.ROOT / "recipes/mlm.py"


@pytest.fixture(autouse=True)
def one_thread(own_cache, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_a_pattern_without_files_ends_all_processes_with_one_line(tmp_path):
    pattern = f"{tmp_path}/*.jsonl.zst"
    codes, output = runs.run_forked(2, "shared/prepare.py", [MLM, "--train_file", pattern], tmp_path)
    assert codes == [2, 2], output
    assert re.findall("error|Traceback", output) == ["error"]
    assert f"error: --train_file {pattern}: no such file (" in output


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
    monkeypatch.setattr("shared.text.tokenized.BLOCK_DOCUMENTS", 20)
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
    said = rf"training +{rows} samples, [\d,]+ tokens.*\nvalidation +\d+ samples.*\nfolder .*\ntime +[\d.]+ s\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    runs.forbid_preparing(monkeypatch)
    prepare.prepare(path, flags, (0, 1))


def test_a_wrong_task_and_a_folder_behind_a_url_are_refused(capsys):
    for words, said in (
        ("--shard 4/4", "--shard: 4/4: give I/N with I from 0 to N-1"),
        ("--shard 4", "--shard: 4: give I/N"),
        ("--to x --shard 0/2", "--shard: not allowed with argument --to"),
        ("--to s3://b/x", "--to: s3://b/x is a URL: give a folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            prepare.main([*words.split(), str(MLM)])
        assert f"error: argument {said}" in capsys.readouterr().err
