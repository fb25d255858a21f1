"""The recipe for sentence embeddings: resuming, export and errors.

test_exactness.py tests that runs on any number of processes are equal.
"""

import json
import shutil

import exact_runs
import numpy as np
import pytest
import runs
import torch
from refusals import files, refusal
from safetensors.torch import load_file
from torch.nn import functional as F

from shared.config import options
from shared.contrastive.sentence_transformers_files import check_modules
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("embeddings")


@pytest.fixture(scope="module")
def configs(texts, tmp_path_factory):
    return exact_runs.embedding_runs(texts, tmp_path_factory.mktemp("triplets"))


@pytest.fixture(scope="module")
def train(recipe):
    def call(output, *flags):
        return recipe.main(options.parse(recipe.Config, [*map(str, flags), "--output_dir", str(output)]))

    return call


@pytest.fixture(scope="module")
def trained(configs, train, tmp_path_factory):
    """The folder of a finished run with dropout, triplets, the symmetric loss and two numbers of dimensions."""
    output = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ACCELERATE_USE_CPU", "true")
        environment.setenv("OMP_NUM_THREADS", "1")
        train(output, *configs["dropout"], "--checkpointing_steps", 4)
    return output


def sentences(configs):
    """Some validation texts."""
    path = configs["gradient"][3]
    return [line.split(",")[0] for line in path.read_text().splitlines()[1:12]]


def test_a_resumed_run_ends_with_the_same_bytes(configs, train, trained, tmp_path):
    middle = trained / "checkpoints/step_00000004"
    train(tmp_path / "again", *configs["dropout"], "--resume_from_checkpoint", middle)
    whole, resumed = ((path / "model/model.safetensors").read_bytes() for path in (trained, tmp_path / "again"))
    assert whole == resumed
    last = [runs.training_lines(path)[-1] for path in (trained, tmp_path / "again")]
    assert (last[0]["samples"], last[0]["loss"]) == (last[1]["samples"], last[1]["loss"])


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
    model = recipe.build_model(
        options.parse(recipe.Config, [*runs.TINY, "--model_name_or_path", str(folder)]), tokenizer
    )
    batch = tokenizer(sentences(configs), padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.no_grad():
        expected = F.normalize(model.eval()(**batch).logits, dim=1).numpy()
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_adapters_are_all_that_is_trained_and_are_merged_into_the_exported_encoder(configs, train, tmp_path):
    from peft import PeftModel
    from transformers import AutoModel

    flags = configs["dropout"]
    base = flags[flags.index("--model_name_or_path") + 1]
    train(tmp_path, *flags, "--lora_rank", 4, "--learning_rate", 0.01, "--max_train_steps", 2, "--eval_steps", 2)
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    merged = AutoModel.from_pretrained(tmp_path / "model").eval()
    adapted = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter").eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        found, plain = (
            model(input_ids=ids).last_hidden_state for model in (merged, AutoModel.from_pretrained(base).eval())
        )
        assert torch.allclose(found, adapted(input_ids=ids).last_hidden_state, atol=1e-5)
    assert (found - plain).abs().max() > 1e-2


def test_the_exported_folder_names_pooling_and_length(trained):
    folder = trained / "model"
    assert [module["path"] for module in json.loads((folder / "modules.json").read_text())] == [
        "",
        "1_Pooling",
        "2_Normalize",
    ]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] is True
    assert pooling["pooling_mode_cls_token"] is False
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 48
    assert "SentenceTransformer" in (folder / "README.md").read_text()


def test_a_model_with_more_modules_is_refused_and_another_pooling_is_reported(trained, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(trained / "model", folder)
    check_modules(str(folder), "mean")
    check_modules("a name on the Hub", "cls")
    assert not capsys.readouterr().err
    check_modules(str(folder), "cls")
    assert "another pooling (mean): --pooling cls is used" in capsys.readouterr().err
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="has the modules Dense, which is not supported"):
        check_modules(str(folder), "mean")


def test_settings_without_sense_are_refused_before_anything_is_written(configs, train, tmp_path):
    for flags, message in (
        (["--global_batch_size", 1], "--global_batch_size 1: the negatives of a sample are"),
        (
            ["--global_batch_size", 500],
            "--global_batch_size 500: the negatives of a sample are",
        ),
        (["--matryoshka_dims", 64], "--matryoshka_dims 64: the embeddings have 32 dimensions"),
        (["--text_column_names", "anchor", "answer"], "has no such column (columns: anchor, positive, negative)"),
        (["--metric_name", "accuracy"], "this recipe always computes ndcg_at_10, recall_at_10, mrr_at_10"),
    ):
        assert message in refusal(train, tmp_path / "run", *configs["gradient"], *flags)
    assert not files(tmp_path / "run")
