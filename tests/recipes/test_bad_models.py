"""A model that a recipe cannot train causes a one-line error before the first step."""

import pytest
import runs
import torch
from refusals import files, refusal

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing", "no such folder"),
        ("empty", "has no config.json: use a folder that save_pretrained wrote"),
        ("images", "cannot be loaded by AutoTokenizer: "),
        ("images with tokenizer", "by AutoModelForSequenceClassification: Unrecognized configuration class"),
        ("without weights", "by AutoModelForSequenceClassification: Error no file named model.safetensors"),
        ("cut off", "cannot be loaded by AutoModelForSequenceClassification"),
    ],
)
def test_a_folder_without_a_text_classifier_is_refused(train, models, tmp_path, name, expected):
    message = refusal(train, tmp_path / "run", "--model_name_or_path", models / name)
    assert message.startswith(f"--model_name_or_path {models / name}")
    assert expected in message
    assert not files(tmp_path / "run")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(train, models, tmp_path):
    message = refusal(train, tmp_path, "--model_name_or_path", models / "other tokenizer")
    assert message.startswith(
        "--model_name_or_path: the tokenizer has ids up to 401, but the model has only 400 embeddings"
    )


def test_a_max_length_above_the_positions_of_the_model_is_refused(train, alone, tmp_path):
    flags = ["--model_name_or_path", alone / "model", "--max_length", 49]
    assert refusal(train, tmp_path, *flags) == "--max_length 49 exceeds the model's 48 positions: lower it"


def test_sizes_that_do_not_fit_together_are_refused(train, tmp_path):
    message = refusal(train, tmp_path, "--num_attention_heads", 3)
    assert message.startswith("--hidden_size 32 is not a multiple of twice --num_attention_heads 3")


def test_parameters_that_do_not_affect_the_loss_are_frozen_and_listed_and_the_run_resumes(
    train, nlp, monkeypatch, tmp_path, capsys
):
    build_model = nlp.build_model

    class WithUnusedLayer(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.forgotten = model, torch.nn.Linear(2, 2)

        def forward(self, **batch):
            return self.model(**batch)

    def build_with_an_added_layer(*args):
        model = build_model(*args)
        model.added = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(nlp, "build_model", build_with_an_added_layer)
    message = refusal(train, tmp_path / "refused")
    assert "has added.bias (2 weights differ) could be exported, but from_pretrained would not load it" in message
    monkeypatch.setattr(nlp, "build_model", lambda *args: WithUnusedLayer(build_model(*args)))
    flags = ["--lr_scheduler_type", "constant", "--warmup_ratio", None, "--max_train_steps"]
    train(tmp_path / "whole", *flags, 4)
    expected = "frozen, because the loss does not depend on them: forgotten.weight, forgotten.bias\n"
    assert expected in capsys.readouterr().out
    train(tmp_path / "resumed", *flags, 2)
    train(tmp_path / "resumed", *flags, 4)
    assert torch.equal(runs.weights(tmp_path / "whole"), runs.weights(tmp_path / "resumed"))
