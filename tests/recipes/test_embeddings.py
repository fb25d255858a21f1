"""The recipe for sentence embeddings: scores and export.

test_exactness.py tests that runs on any number of processes are equal.
"""

import json

import exact_runs
import numpy as np
import pytest
import runs
import torch
from torch.nn import functional as F

from shared.config import options

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("embeddings")


@pytest.fixture(scope="module")
def configs(texts, tmp_path_factory):
    return exact_runs.embedding_runs(texts, tmp_path_factory.mktemp("triplets"))


@pytest.fixture(scope="module")
def trained(recipe, configs, tmp_path_factory):
    """The folder of a finished run with dropout, triplets, the symmetric loss and two numbers of dimensions."""
    output = tmp_path_factory.mktemp("trained") / "run"
    runs.train(recipe, output, *configs["dropout"])
    return output


def sentences(configs):
    """Some validation texts."""
    path = configs["gradient"][3]
    return [line.split(",")[0] for line in path.read_text().splitlines()[1:12]]


def test_the_scores_of_each_number_of_dimensions_are_logged(trained):
    (scores,) = [line for line in runs.metrics(trained) if "eval_loss" in line]
    names = {name for name in scores if name.startswith("eval_")} - {"eval_loss"}
    shared = {"eval_ndcg_at_10", "eval_recall_at_10", "eval_mrr_at_10"}
    assert names == shared | {"eval_ndcg_at_10_dim_32", "eval_ndcg_at_10_dim_8"}
    assert scores["eval_ndcg_at_10"] == scores["eval_ndcg_at_10_dim_32"]  # all dimensions


def test_transformers_loads_the_exported_encoder_and_gives_the_embeddings_of_the_recipe(recipe, configs, trained):
    from transformers import AutoModel, AutoTokenizer

    folder = trained / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(sentences(configs), padding=True, truncation=True, max_length=48, return_tensors="pt")
    config = options.parse(recipe.Config, [*runs.TINY, "--model_name_or_path", str(folder)])
    ours = recipe.build_model(config, tokenizer).eval()
    with torch.no_grad():
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        means = (hidden * mask).sum(1) / mask.sum(1)
        assert torch.allclose(ours(**batch).logits, means, rtol=1e-5, atol=1e-6)


@pytest.mark.docs  # importing the library takes seconds
def test_sentence_transformers_loads_the_exported_model_and_gives_the_same_vectors(recipe, configs, trained):
    from sentence_transformers import SentenceTransformer

    folder = trained / "model"
    library = SentenceTransformer(str(folder), device="cpu")
    assert [type(module).__name__ for module in library] == ["Transformer", "Pooling", "Normalize"]
    assert library.max_seq_length == 48
    found = library.encode(sentences(configs))
    tokenizer = library.tokenizer
    config = options.parse(recipe.Config, [*runs.TINY, "--model_name_or_path", str(folder)])
    model = recipe.build_model(config, tokenizer)
    batch = tokenizer(sentences(configs), padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.no_grad():
        expected = F.normalize(model.eval()(**batch).logits, dim=1).numpy()
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_exported_folder_names_pooling_and_length(trained):
    folder = trained / "model"
    modules = json.loads((folder / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] is True
    assert pooling["pooling_mode_cls_token"] is False
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 48
    assert "SentenceTransformer" in (folder / "README.md").read_text()
