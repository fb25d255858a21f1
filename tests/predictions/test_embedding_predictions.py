"""`python -m shared.predict` for embeddings: equal to transformers, to sentence-transformers and to the run."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import runs
import torch
from predicting import predict_file, read_csv, read_jsonl, write_csv, write_jsonl
from runs import refusal
from torch.nn import functional as F

from shared import mine_negatives, predict


@pytest.fixture(scope="module")
def pairs(texts, tmp_path_factory):
    """CSV files of pairs, for training and validation: the first and the second half of each text."""
    folder, files = tmp_path_factory.mktemp("pairs"), []
    for name, file in (("train", texts[1]), ("validation", texts[3])):
        words = [row["text"].split() for row in read_csv(file)]
        rows = [(" ".join(each[::2]), " ".join(each[1::2])) for each in words]
        rows[5] = rows[4][0], rows[5][1]  # an anchor with two positives
        files.append(write_csv(folder / f"{name}.csv", ("anchor", "positive"), rows))
    return files


@pytest.fixture(scope="module", params=["mean"])
def trained(pairs, tmp_path_factory, request):
    """The output folder of a short run, and its last evaluation."""
    output = tmp_path_factory.mktemp("trained") / "run"
    flags = [*runs.TINY, "--train_file", pairs[0], "--validation_file", pairs[1], "--max_length", 24, 48]
    kind = ["--static"] if request.param == "static" else ["--pooling", request.param]
    flags += ["--matryoshka_dims", 32, 8, *kind, "--prompts", "find: ", ""]
    return output, runs.train("embeddings", output, *flags)


def vectors(file, name):
    """float32 [rows, dimensions] of a Parquet file."""
    return np.array(pq.read_table(file)[f"embedding_{name}"].to_pylist(), np.float32)


def test_without_a_file_the_scores_are_those_of_the_runs_evaluation(trained, pairs, tmp_path):
    run, reported = trained
    scores = predict_file(run, "--predictions_file", tmp_path / "own.parquet")
    assert scores == pytest.approx(reported, rel=1e-5)
    shared = "loss", "ndcg_at_10", "recall_at_10", "mrr_at_10", "ndcg_at_10_dim_32", "ndcg_at_10_dim_8"
    assert [*scores] == [f"eval_{name}" for name in shared]
    assert reported["eval_ndcg_at_10"] == reported["eval_ndcg_at_10_dim_32"]  # all dimensions
    table = pq.read_table(tmp_path / "own.parquet")
    assert table.column_names == ["anchor", "positive", "embedding_anchor", "embedding_positive"]
    of_file = predict_file(run, pairs[1], "--max_tokens_per_micro_batch", 96)  # the same pairs, in other passes
    assert of_file == pytest.approx(reported, rel=1e-5)
    own = "objective_of = lambda _: type('Own', (), {'evaluate': lambda *_: {'eval_loss': 7.0}})\n"
    (tmp_path / "own.py").write_text((runs.ROOT / "recipes/embeddings.py").read_text() + own)
    flags = "--recipe", tmp_path / "own.py", "--predictions_file", tmp_path / "again.parquet"
    assert predict_file(run, *flags) == {"eval_loss": 7.0}


def test_the_vectors_are_those_of_transformers_in_the_order_of_the_input(trained, pairs, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    run, folder = trained[0], trained[0] / "model"
    given = [row["positive"] for row in read_csv(pairs[1])]
    rows = [{"id": f"0{i}", "body": text} for i, text in enumerate(given)]
    write_jsonl(tmp_path / "new.jsonl", rows)
    own = ["--text_column_names", "body", "--prompts", "", "--max_length", 48]
    assert predict_file(run, tmp_path / "new.jsonl", *own) == {}  # no pairs, so no scores
    found = read_jsonl(run / "predictions/new.jsonl")
    assert [{name: row[name] for name in ("id", "body")} for row in found] == rows

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    for row in found:
        batch = tokenizer(row["body"], truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            expected = F.normalize(model(input_ids=batch["input_ids"]).last_hidden_state.mean(1), dim=1)[0]
        assert row["embedding_body"] == pytest.approx(expected.tolist(), abs=1e-5)
    # a column that the run's data have is found without a flag, and a model without its run gives the same vectors
    flags = [*own[:4], "--max_tokens_per_micro_batch", 192]  # the folder has the length
    predict_file(folder, tmp_path / "new.jsonl", *flags, "--predictions_file", tmp_path / "model.parquet")
    expected = np.array([row["embedding_body"] for row in found])
    assert vectors(tmp_path / "model.parquet", "body") == pytest.approx(expected, abs=1e-6)
    for name in ("anchor", "body"):  # the prompt of a column, and a text that begins with it
        (tmp_path / f"{name}.csv").write_text(f"{name}\n{'find: ' * (name == 'body')}a text\n")
        predict_file(run, tmp_path / f"{name}.csv", *own * (name == "body"))
    found = [vectors(run / f"predictions/{name}.parquet", name) for name in ("anchor", "body")]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.docs  # importing the library takes seconds
@pytest.mark.parametrize("trained", ["mean", "cls", "static"], indirect=True)
def test_the_vectors_are_those_of_sentence_transformers(trained, pairs, tmp_path):
    from sentence_transformers import SentenceTransformer

    given = [row["anchor"] for row in read_csv(pairs[1])]
    library = SentenceTransformer(str(trained[0] / "model"), device="cpu")
    for folder in (trained[0], trained[0] / "model"):
        output = tmp_path / f"{folder.name}.parquet"
        own = [] if folder == trained[0] else ["--prompts", "find: ", ""]
        predict_file(folder, pairs[1], "--predictions_file", output, "--max_length", 48, *own)
        assert vectors(output, "anchor") == pytest.approx(library.encode_query(given), abs=1e-5)


def test_scored_pairs_have_the_correlations_of_the_run(pairs, tmp_path):
    files = []
    for file in pairs:
        rows = [[*row.values(), i * 7 % 11] for i, row in enumerate(read_csv(file))]
        files.append(write_csv(tmp_path / file.name, ("anchor", "positive", "score"), rows))
    run = tmp_path / "run"
    flags = [*runs.TINY, "--train_file", files[0], "--validation_file", files[1], "--label_column_name", "score"]
    reported = runs.train("embeddings", run, *flags)
    assert {*reported} == {"eval_loss", "eval_spearman", "eval_pearson"}
    assert predict_file(run, "--predictions_file", tmp_path / "own.parquet") == pytest.approx(reported, rel=1e-4)
    gap = files[1].rename(tmp_path / "gap.csv")
    gap.write_text(f"{gap.read_text()}a,b,NA\n")
    assert predict_file(run, gap, "--skip_incomplete_rows") == pytest.approx(reported, rel=1e-4)
    assert predict_file(run, pairs[1], "--predictions_file", tmp_path / "no_scores.parquet") == {}
    as_pairs = ["--label_column_name", "None", "--predictions_file", tmp_path / "pairs.parquet"]
    assert "eval_ndcg_at_10" in predict_file(run, pairs[1], *as_pairs)
    (tmp_path / "list.jsonl").write_text('{"anchor": "a", "positive": "b", "score": [1]}\n')
    assert "contains list<item: int64>, not numbers" in refusal(predict_file, run, tmp_path / "list.jsonl")
    assert "pairs with scores search no texts" in refusal(predict_file, run, gap, "--corpus_file", gap)


def test_with_a_corpus_each_anchor_also_searches_its_texts(pairs, tmp_path):
    texts = [row["positive"] for row in (*read_csv(pairs[0]), *read_csv(pairs[1])[:9])]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"positive": text} for text in texts])
    run = tmp_path / "run"
    flags = [*runs.TINY, "--train_file", pairs[0], "--validation_file", pairs[1], "--corpus_file", corpus]
    reported = runs.train("embeddings", run, *flags)
    assert predict_file(run, "--predictions_file", tmp_path / "own.parquet") == pytest.approx(reported, rel=1e-4)
    of_file = predict_file(run, pairs[1], "--predictions_file", tmp_path / "pairs.parquet")  # the corpus of the run
    assert of_file["eval_mrr_at_10"] > reported["eval_mrr_at_10"]  # belongs to the data of the run
    flags = ["--corpus_file", corpus, "--predictions_file", tmp_path / "both.parquet"]
    assert predict_file(run, pairs[1], *flags) == pytest.approx(reported, rel=1e-4)
    with_negatives = [[*row.values(), "a negative"] for row in read_csv(pairs[1])]
    file = write_csv(tmp_path / "negatives.csv", ("anchor", "positive", "negative"), with_negatives)
    flags[3:] = [tmp_path / "three.parquet", "--text_column_names", "anchor", "positive", "negative"]
    assert predict_file(run, file, *flags) == pytest.approx(reported, rel=1e-4)
    corpus.write_text('{"positive": "another text"}\n')
    assert "no longer those of the run" in refusal(predict_file, run)
    corpus.write_text('{"answer": "another text"}\n')
    assert "--text_column_names positive: --corpus_file" in refusal(predict_file, run)


def mine(*words):
    """Call `python -m shared.mine_negatives` with these words."""
    predict.predict(mine_negatives.parse_mining([str(word) for word in words]), mine_negatives.mine)


def test_mined_negatives_are_those_of_one_process_and_can_be_trained_on(trained, pairs, tmp_path):
    run, mined = trained[0], tmp_path / "mined.jsonl"
    flags = ["--negatives", 3, "--share_of_positive", 0.999, "--predictions_file"]
    codes, output = runs.run_forked(2, "shared/mine_negatives.py", [run, pairs[0], *flags, mined], tmp_path)
    assert codes == [0, 0], output
    mine(run, pairs[0], *flags, tmp_path / "one.jsonl")
    assert mined.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    given, found = read_csv(pairs[0]), read_jsonl(mined)
    kept = [row for row in given if row in [{name: each[name] for name in row} for each in found]]
    assert [{name: row[name] for name in given[0]} for row in found] == kept
    assert f"{len(given) - len(found)} of {len(given)} rows of FILE {pairs[0]} have fewer than 3 texts" in output
    assert 0 < len(found) < len(given)
    assert all(len({*row["negatives"]} - {row["positive"]}) == 3 for row in found)
    words = [*runs.TINY, "--train_file", mined, "--text_column_names", "anchor", "positive", "negatives"]
    words += ["--max_tokens_per_micro_batch", 240, "--max_train_steps", 2]
    assert runs.train("embeddings", tmp_path / "run", *words)["eval_loss"] > 0


def test_what_cannot_be_mined_is_one_line_and_no_file(trained, pairs, tmp_path):
    run, output = trained[0], tmp_path / "mined.parquet"
    (tmp_path / "taken.csv").write_text("anchor,positive,negatives\na,b,c\nc,d,e\ne,f,g\ng,h,i\ni,j,k\n")
    last = ["--predictions_file", output]
    for words, expected in (
        ([pairs[0]], "give a FILE of pairs, and name the file to write with --predictions_file"),
        (last, "give a FILE of pairs"),
        ([pairs[0], *last, "--negatives", 500], "have fewer than 500 texts"),
        ([pairs[0], *last, "--corpus_file", pairs[1]], "--corpus_file has no effect on negatives"),
        ([tmp_path / "taken.csv", *last], "has a column negatives, as the predictions have: rename it"),
        ([pairs[0], *last, "--share_of_positive", 0, "--negatives", 90], "lower --negatives, raise --share_of_"),
    ):
        assert expected in refusal(mine, run, *words), words
    assert not output.exists()


def test_bad_input_is_one_line(trained, pairs, tmp_path):
    run, _ = trained
    (tmp_path / "other.csv").write_text("query,answer\na,b\n")
    for words, expected in (
        ([pairs[1], "--predictions_file", "x.csv"], "must end in .parquet, .jsonl, the possible formats of"),
        ([pairs[1], "--text_column_names", "anchor", "answer"], "--text_column_names answer: FILE"),
        ([tmp_path / "other.csv", "--text_column_names", "query"], "--prompts 'find: ' '': give one for each of "),
    ):
        assert expected in refusal(predict_file, run, *words), words
    assert "--prompts is needed, one for each text column or '': " in refusal(predict_file, run / "model", pairs[1])


def test_a_model_of_sentence_transformers_with_other_steps_is_refused(trained, pairs, tmp_path):
    dense = {"3": {"type": "x.Dense", "path": "3_Dense"}}
    for file, change, expected in (
        ("modules.json", dense, "sentence-transformers has Dense"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "--pooling 'max': expected"),
        ("1_Pooling/config.json", {"include_prompt": False}, "without prompts': expected"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "has do_lower_case"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "has default_prompt_name"),
    ):
        folder = shutil.copytree(trained[0] / "model", tmp_path / expected)
        found = json.loads((folder / file).read_text())
        found = found | change if isinstance(found, dict) else [*found, *change.values()]
        (folder / file).write_text(json.dumps(found))
        assert expected in refusal(predict_file, folder, pairs[1])
