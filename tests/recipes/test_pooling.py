"""`recipes/nlp.py --pooling`: what the head reads of a text, in the run and in transformers, packed and padded."""

import families
import pytest
import runs
import torch
from one_text_at_a_time import loss_of
from transformers import AutoConfig, AutoModelForSequenceClassification

from shared.config import options
from shared.pretrained.from_pretrained import POOLINGS


@pytest.fixture(scope="module")
def prepared(nlp, texts):
    """(labels, tokenizer) of the small data set."""
    *_, labels, tokenizer = runs.prepared(nlp, [*runs.TINY, *texts])
    return labels, tokenizer


@pytest.fixture(scope="module")
def model_of(prepared, tmp_path_factory):
    """A function that writes a tiny model of a type, with random weights, and returns its folder."""
    labels, tokenizer = prepared
    folder = tmp_path_factory.mktemp("models")

    def write(kind):
        sizes = families.SIZES | {"vocab_size": len(tokenizer), "num_labels": labels.num_labels}
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **sizes))
        for each in (model, tokenizer):
            each.save_pretrained(folder / kind)
        return folder / kind

    return write


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", POOLINGS)
def test_the_head_reads_the_first_token_or_the_mean_over_the_real_tokens(nlp, prepared, model_of, kind, pooling):
    labels, tokenizer = prepared
    given = ["--model_name_or_path", str(model_of(kind)), "--pooling", pooling, "--max_length", "48"]
    model = nlp.build_model(options.parse(nlp.Config, given), labels, tokenizer).eval()
    ids = torch.randint(5, len(tokenizer), (3, 9), generator=torch.Generator().manual_seed(0))
    real = torch.arange(9) < torch.tensor([[9], [5], [1]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, attention_mask=real.long()).last_hidden_state
        rows = zip(hidden, real, strict=True)
        pooled = hidden[:, 0] if pooling == "cls" else torch.stack([row[where].mean(0) for row, where in rows])
        transformed = model.activation(model.dense(pooled)) if kind == "eurobert" else model.head(pooled)
        expected = model.classifier(transformed)
        for padding in (tokenizer.pad_token_id, 7):
            batch = {"input_ids": ids.masked_fill(~real, padding), "attention_mask": real.long()}
            assert runs.distance(model(**batch).logits, expected) < 1e-5


@pytest.fixture(scope="module")
def outputs(texts, model_of, tmp_path_factory):
    """The folder of runs, each with the opposite of the model's own pooling."""
    folder, tiny = tmp_path_factory.mktemp("outputs"), [*texts, *runs.TINY]
    cls, mean = [*tiny, "--pooling", "cls"], [*tiny, "--pooling", "mean", "--model_name_or_path", model_of("eurobert")]
    for name, flags in {"padded": [*cls, "--no_packing"], "packed": cls, "loaded": mean}.items():
        runs.train("nlp", folder / name, *flags, "--learning_rate", 1e-3)
    runs.run_many(2, {"packed": [*cls, "--learning_rate", 1e-3]}, folder)
    return folder


def test_transformers_reads_the_pooling_and_gives_the_reported_loss_and_packing_does_not_matter(outputs, texts):
    for name, pooling in {"padded": "cls", "packed": "cls", "loaded": "mean"}.items():
        folder = outputs / name / "model"
        assert AutoConfig.from_pretrained(folder).classifier_pooling == pooling
        found = runs.evaluation(outputs / name)["eval_loss"]
        assert found == pytest.approx(loss_of(folder, texts[3]), rel=1e-5)
    padded, packed, two = (runs.weights(outputs / name) for name in ("padded", "packed", "packed-2"))
    assert max(runs.distance(packed, padded), runs.distance(two, padded)) < 1e-5
