"""`python -m shared.predict` for tags of words: equal to transformers and to the run, for words, texts and CoNLL."""

import re

import pyarrow.parquet as pq
import pytest
import runs
import torch
from predicting import predict_file, read_csv, read_jsonl, write_jsonl
from runs import refusal

from shared.encoders import attention

ARTICLES = ("the", "a", "an")  # an article and the next word are an entity
DROPPED = "\u200b"  # a word without tokens


def tagged(text):
    """The row of a text: its words, their tags and the spans of the entities."""
    found = list(re.finditer(r"\w+|[^\w\s]", text))
    tags = ["B-ART" if match.group().lower() in ARTICLES else "O" for match in found]
    for i, tag in enumerate(tags[:-1]):
        if tag == "B-ART" and tags[i + 1] == "O":
            tags[i + 1] = "I-ART"
    ends = [i for i, _ in enumerate(tags) if tags[i] != "O" and tags[i + 1 : i + 2] != ["I-ART"]]
    begins = [i for i, tag in enumerate(tags) if tag == "B-ART"]
    spans = [
        {"start": found[first].start(), "end": found[last].end(), "label": "ART"}
        for first, last in zip(begins, ends, strict=True)
    ]
    return {"text": text, "spans": spans, "tokens": [match.group() for match in found], "tags": tags}


@pytest.fixture(scope="module")
def rows(texts):
    """Rows of `tagged` of the validation file; half of them are longer than a window."""
    return [tagged(row["text"]) for row in read_csv(texts[3])]


@pytest.fixture(scope="module")
def trained(texts, rows, tmp_path_factory):
    """The output folder of a short run, and its last evaluation."""
    folder = tmp_path_factory.mktemp("tagged")
    train = [tagged(row["text"]) for row in read_csv(texts[1])]
    flags = [*runs.TINY, "--max_length", 24, "--stride", 6, "--learning_rate", 1e-2]
    for name, part in (("train", train), ("validation", rows)):
        write(folder / f"{name}.jsonl", part, "tokens", "tags")
        flags += [f"--{name}_file", folder / f"{name}.jsonl"]
    flags += ["--max_train_steps", 16, "--eval_steps", 16]
    return folder / "run", runs.train("token_classification", folder / "run", *flags)


def write(file, rows, *columns):
    return write_jsonl(file, [{name: row[name] for name in columns if name in row} for row in rows])


def test_without_a_file_the_scores_are_those_of_the_runs_evaluation(trained, rows, tmp_path):
    run, reported = trained
    assert predict_file(run, "--predictions_file", tmp_path / "own.parquet") == pytest.approx(reported, rel=1e-6)
    found = pq.read_table(tmp_path / "own.parquet").to_pylist()
    assert [(row["tokens"], row["tags"]) for row in found] == [(row["tokens"], row["tags"]) for row in rows]
    hits = [a == b for row in found for a, b in zip(row["tags"], row["prediction"], strict=True)]
    assert sum(hits) / len(hits) == pytest.approx(reported["eval_accuracy"])
    flags = ["--max_tokens_per_micro_batch", 48, "--predictions_file", tmp_path / "file.parquet"]  # in other passes
    file = write(tmp_path / "new.jsonl", rows, "tokens", "tags")
    assert predict_file(run, file, *flags) == pytest.approx(reported, rel=1e-6)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_attention_is_chosen_for_the_precision_of_the_launcher(trained, tmp_path, monkeypatch, precision):
    """A GPU would refuse packed attention that was chosen for another precision."""
    chosen_for, why_not = [], attention.why_not_flash
    monkeypatch.setattr(attention, "why_not_flash", lambda *words: chosen_for.append(words[2]) or why_not(*words))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    predict_file(trained[0], "--predictions_file", tmp_path / "own.parquet")
    assert {precision} <= set(chosen_for) <= {precision, "no"}  # a self-check is always in full precision


def test_the_tags_are_those_of_transformers_in_the_order_of_the_input(trained, rows, tmp_path, capsys):
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    given = [dict(row) for row in rows]
    given[1]["tokens"] = [DROPPED, *given[1]["tokens"][1:]]
    given[2]["tags"] = None
    given.insert(4, {"tokens": [], "tags": []})
    file, output = write(tmp_path / "new.jsonl", given, "tokens", "tags"), tmp_path / "out.jsonl"
    scores = predict_file(trained[0], file, "--predictions_file", output, "--max_tokens_per_micro_batch", 48)
    assert f"2 of {len(rows) + 1} rows have no label" in capsys.readouterr().err

    found = read_jsonl(output)
    assert [row["tokens"] for row in found] == [row["tokens"] for row in given]
    assert (found[4]["prediction"], found[4]["probability"]) == ([], [])
    assert (found[1]["prediction"][0], found[1]["probability"][0]) == ("O", None)
    folder = trained[0] / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForTokenClassification.from_pretrained(folder)
    for row in found:
        batch = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        if batch["input_ids"].shape[1] > 24:  # several windows
            continue
        with torch.no_grad():
            shares, tags = model.eval()(input_ids=batch["input_ids"]).logits[0].softmax(1).max(1)
        for word in {*batch.word_ids()} - {None}:
            place = batch.word_ids().index(word)
            assert row["prediction"][word] == model.config.id2label[int(tags[place])]
            assert row["probability"][word] == pytest.approx(float(shares[place]), abs=1e-5)
    scored = [row for row in found if row["tags"]]
    hits = [a == b for row in scored for a, b in zip(row["tags"], row["prediction"], strict=True)]
    assert scores["eval_accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_a_text_has_the_tags_of_its_words_and_entities_in_the_form_of_its_spans(trained, rows, tmp_path):
    of_words = write(tmp_path / "words.jsonl", rows, "tokens", "tags")
    of_texts = write(tmp_path / "texts.jsonl", [*rows, {"text": " ", "spans": []}], "text", "spans")
    flags = ["--text_column_name", "text", "--label_column_name", "spans", "--predictions_file", tmp_path / "b.jsonl"]
    expected = predict_file(trained[0], of_words, "--predictions_file", tmp_path / "a.jsonl")
    assert predict_file(trained[0], of_texts, *flags) == pytest.approx(expected)
    words, found = read_jsonl(tmp_path / "a.jsonl"), read_jsonl(tmp_path / "b.jsonl")
    assert [found[-1][name] for name in ("words", "prediction", "probability", "entities")] == [[], [], [], []]
    for row, text in zip(words, found[:-1], strict=True):
        assert text["words"] == row["tokens"]
        assert text["prediction"] == row["prediction"]
        assert text["probability"] == pytest.approx(row["probability"], abs=1e-6)
    assert sum(len(row["entities"]) for row in found) > 20
    # the entities are labels for another run: they are all found
    write(tmp_path / "again.jsonl", [{**row, "spans": row["entities"]} for row in found], "text", "spans")
    flags[-1] = tmp_path / "c.jsonl"
    assert predict_file(trained[0], tmp_path / "again.jsonl", *flags)["eval_f1"] == 1


def test_conll_files_with_and_without_tags(trained, rows, tmp_path):
    tagged = ["\n".join(map(" x ".join, zip(row["tokens"], row["tags"], strict=True))) for row in rows[:5]]
    (tmp_path / "tags.conll").write_text("\n\n".join(tagged) + "\n")
    (tmp_path / "words.txt").write_text("\n\n".join("\n".join(row["tokens"]) for row in rows[:5]) + "\n")
    expected = predict_file(trained[0], write(tmp_path / "same.jsonl", rows[:5], "tokens", "tags"))
    assert [predict_file(trained[0], tmp_path / name) for name in ("tags.conll", "words.txt")] == [expected, {}]
    same, tagged, words = (read_jsonl(trained[0] / f"predictions/{name}.jsonl") for name in ("same", "tags", "words"))
    assert tagged == same
    assert [row["prediction"] for row in words] == [row["prediction"] for row in same]


def test_bad_input_is_one_line(trained, rows, tmp_path):
    run = trained[0]
    write(tmp_path / "words.jsonl", rows, "tokens", "tags")
    write(tmp_path / "unknown.jsonl", [rows[0], {"tokens": ["a"], "tags": ["B-NEW"]}], "tokens", "tags")
    write(tmp_path / "empty.jsonl", [{"tokens": [], "tags": []}], "tokens", "tags")
    for name, flags, expected in (
        ("unknown", [], "or use --no_scores"),
        ("empty", [], "has no words in tokens"),
        ("words", ["--label_column_name", "a"], "--label_column_name a: FILE"),
    ):
        assert expected in refusal(predict_file, run, tmp_path / f"{name}.jsonl", *flags), (name, flags)
