"""Static models: where their vectors come from, what they refuse. tests/predictions tests what they compute."""

import copy
import dataclasses

import pytest
import runs
import torch
import toy_data
from tokenizers import Tokenizer
from transformers import AutoModel

from shared.config import options
from shared.contrastive.models import SentenceTokenizer, static_tokenizer

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")
recipe = runs.load_recipe("embeddings")


@pytest.fixture(scope="module")
def flags(texts, tmp_path_factory):
    """Those of a tiny run from a BERT."""
    folder = tmp_path_factory.mktemp("static")
    data = toy_data.tiny("embeddings", texts, folder)
    bert = toy_data.write_encoder_with_dropout(folder / "bert", "embeddings", data)
    return [*data, "--model_name_or_path", bert]


@pytest.fixture(scope="module")
def built(flags):
    """The config, the tokenizer and the model before training."""
    config = options.parse(recipe.Config, [*map(str, flags), "--static"])
    *_, tokenizer = recipe.load_data(config)
    return config, tokenizer, recipe.build_model(config, tokenizer)


def test_the_vectors_begin_as_the_input_embeddings_of_the_model(built):
    bert = AutoModel.from_pretrained(built[0].model_name_or_path)
    ((name, vectors),) = built[2].named_parameters()
    assert name == "embedding.weight"
    assert torch.equal(vectors, bert.get_input_embeddings().weight)


def test_texts_have_no_special_tokens(built):
    config, tokenizer, _ = built
    train, *_ = recipe.load_data(config)
    special = {*tokenizer("")["input_ids"]}
    assert special
    assert not special & {*train.columns[0].input_ids.tolist()}
    once = static_tokenizer(tokenizer)
    assert once("a text")["input_ids"] == tokenizer("a text", add_special_tokens=False)["input_ids"]
    assert static_tokenizer(once)("a text") == once("a text")


@pytest.mark.parametrize(("side", "kept"), [("right", slice(None, 3)), ("left", slice(-3, None))])
def test_the_exported_tokenizer_cuts_a_text_off_where_the_training_does(built, tmp_path, side, kept):
    config, tokenizer, _ = built
    whole = static_tokenizer(tokenizer)("a text that is too long")["input_ids"]
    assert len(whole) > 3
    sided = copy.deepcopy(tokenizer)
    sided.truncation_side = side
    SentenceTokenizer(sided, dataclasses.replace(config, max_length=(3,)), 32).save_pretrained(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a text that is too long").ids == whole[kept]


def test_training_goes_on_from_a_static_model_and_only_with_the_flag(flags, tmp_path):
    def train(name, model, *more):
        words = [*flags[:-1], model, "--max_train_steps", 2, "--eval_steps", 2, *more]
        return runs.train("embeddings", tmp_path / name, *words)

    first = train("first", flags[-1], "--static", "--learning_rate", 1)
    folder = tmp_path / "first/model"
    again = train("again", folder, "--static", "--learning_rate", 1e-12)
    assert again["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    for more, expected in (
        ([], f"--model_name_or_path {folder} is a static model: add --static"),
        (["--static", "--lora_rank", 2], "--lora_rank: the encoder of a StaticModel has no linear layers to adapt"),
        (["--static", "--gradient_checkpointing"], "--gradient_checkpointing: StaticModel"),
    ):
        assert runs.refusal(train, "refused", folder, *more).startswith(expected)
        assert not (tmp_path / "refused/model").exists()
