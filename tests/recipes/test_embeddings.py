"""The recipe for sentence embeddings: scores and export.

test_exactness.py tests that runs on any number of processes are equal, tests/predictions that transformers and
sentence-transformers load the exported model and give its vectors.
"""

import json

import exact_runs
import pytest
import runs

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """The folder of a finished run with dropout, two negatives, prompts, the symmetric loss and two sizes."""
    output = tmp_path_factory.mktemp("trained") / "run"
    runs.train("embeddings", output, *exact_runs.embedding_runs(texts, tmp_path_factory.mktemp("data"))["dropout"])
    return output


def test_the_scores_of_each_number_of_dimensions_are_logged(trained):
    scores = runs.evaluation(trained)
    names = {name for name in scores if name.startswith("eval_")} - {"eval_loss"}
    shared = {"eval_ndcg_at_10", "eval_recall_at_10", "eval_mrr_at_10"}
    assert names == shared | {"eval_ndcg_at_10_dim_32", "eval_ndcg_at_10_dim_8"}
    assert scores["eval_ndcg_at_10"] == scores["eval_ndcg_at_10_dim_32"]  # all dimensions


def test_the_exported_folder_names_pooling_length_and_prompts(trained):
    folder = trained / "model"
    modules = json.loads((folder / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] is True
    assert pooling["pooling_mode_cls_token"] is False
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 48
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": "find: ", "document": ""}
    assert settings["default_prompt_name"] is None
    assert "SentenceTransformer" in (folder / "README.md").read_text()
