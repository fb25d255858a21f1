"""The recipe that made a run predicts: a loss that a user has changed is the one that `shared.predict` reports."""

import pyarrow.parquet as pq
import pytest
import runs
from predicting import predict_file
from runs import refusal

LOSSES = {  # of a recipe: its loss, and another one
    "recipes/nlp.py": ("return F.cross_entropy(", "return 10 * F.cross_entropy("),
    "docs/examples/own_head.py": ("F.cross_entropy(", "10 * F.cross_entropy("),
}


@pytest.fixture(scope="module", params=LOSSES)
def trained(request, texts, tmp_path_factory):
    """The output folder of a run of a copied recipe with another loss, its last evaluation, and the copy."""
    folder = tmp_path_factory.mktemp("copied")
    code = (runs.ROOT / request.param).read_text()
    assert code.count(LOSSES[request.param][0]) == 1
    copy = folder / "copied_recipe.py"
    copy.write_text(code.replace(*LOSSES[request.param]))
    flags = ["--max_length", 20, "--max_tokens_per_micro_batch", 96, "--max_train_steps", 4, "--eval_steps", 4]
    if "own_head" in request.param:
        flags += ["--model_name_or_path", runs.write_bert_with_dropout(folder / "bert", texts)]
    return folder / "run", runs.train(runs.load(copy), folder / "run", *texts, *flags), copy


def test_a_changed_loss_is_what_predictions_report(trained, texts, tmp_path):
    run, reported, _ = trained
    assert reported["eval_loss"] > 3
    for words in ([], [texts[3]]):
        scores = predict_file(run, *words, "--predictions_file", tmp_path / f"{len(words)}.parquet")
        assert {name: scores[name] for name in reported} == pytest.approx(reported, rel=1e-6)
    rows = pq.read_table(tmp_path / "1.parquet").to_pylist()
    assert reported["eval_accuracy"] == pytest.approx(sum(row["label"] == row["prediction"] for row in rows) / 37)


def test_a_recipe_that_was_moved_is_named_and_one_that_has_changed_is_not_mixed(trained, texts, tmp_path):
    run, _, copy = trained
    moved, flags = tmp_path / "moved_recipe.py", ["--predictions_file", tmp_path / "out.csv"]
    copy.rename(moved)
    try:
        assert "does not exist: name its place with --recipe" in refusal(predict_file, run, texts[3], *flags)
        scores = predict_file(run, texts[3], *flags, "--recipe", moved)
        assert predict_file(run, texts[3], *flags, f"--recipe={moved}") == scores
        moved.write_text(moved.read_text().replace("10 * F", "5 * F"))
        assert "differs in recipe)" in refusal(predict_file, run, texts[3], *flags, "--recipe", moved)
    finally:
        moved.write_text(moved.read_text().replace("5 * F", "10 * F"))
        moved.rename(copy)


def test_validation_data_that_have_changed_since_the_run_are_refused(trained, texts, tmp_path):
    run, file = trained[0], texts[3]
    before = file.read_text()
    file.write_text(before.replace("asyncio\n", "email\n", 1))
    try:
        assert "restore them" in refusal(predict_file, run)
    finally:
        file.write_text(before)
