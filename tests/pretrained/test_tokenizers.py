"""Errors for pretrained tokenizers without words, without the words of the texts, or without a padding token."""

import shutil

import pytest
import runs
import torch
from one_text_at_a_time import logits_of
from predicting import read_csv, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
)

from shared.pretrained.tokenizers import load_tokenizer, special_tokens_around

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
END = "<|endoftext|>"


# Models without tokenizer files, for which transformers makes up a tokenizer without words


@pytest.mark.parametrize("kind", ["bert", "roberta", "albert", "deberta-v2", "xlm-roberta", "gpt2", "t5"])
def test_a_model_without_tokenizer_files_is_refused(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) < 110, "otherwise our check is not needed"
    message = runs.refusal(load_tokenizer, str(tmp_path))
    assert message.startswith(f"--model_name_or_path {tmp_path}: its tokenizer knows no words, ")
    assert "tokenizer.json" in message


def train(recipe, output, *flags):
    runs.train(recipe, output, *runs.TINY, *flags)


def test_the_revision_is_passed_to_the_hub_and_to_every_loader(monkeypatch):
    """The config, the weights and the tokenizer are all those of the given revision."""
    import transformers

    from shared.pretrained import from_pretrained

    asked, loaded = [], (torch.nn.Linear(1, 1), {})
    monkeypatch.setattr(from_pretrained, "require_weights", lambda *_: None)
    monkeypatch.setattr(from_pretrained, "require_model", lambda _, revision, __: asked.append(revision))
    for auto in ("AutoTokenizer", "AutoModelForMaskedLM"):
        found = classmethod(lambda _, name, **given: asked.append(given.get("revision")) or loaded)
        monkeypatch.setattr(getattr(transformers, auto), "from_pretrained", found)
        from_pretrained.load_pretrained(auto, "someone/model", "v2")
        from_pretrained.load_pretrained(auto, "someone/model")
    assert asked == ["v2", "v2", None, None] * 2


@pytest.mark.parametrize("recipe", ["nlp", "mlm"])
def test_texts_with_few_words_of_the_vocabulary_give_a_warning_and_those_with_none_are_refused(
    alone, tmp_path, capsys, recipe
):
    def write(*unknown_of_ten):
        rows = [(" ".join(["щ"] * n + ["a"] * (10 - n)), "xy"[i % 2]) for i, n in enumerate(unknown_of_ten)]
        file = runs.write_rows(tmp_path / "train.csv", *rows)
        files = ["--train_file", file, "--model_name_or_path", tmp_path / "model"]
        return [*files, "--max_train_steps", 1]

    shutil.copytree(alone / "model", tmp_path / "model")
    if recipe == "mlm":
        config = AutoConfig.for_model("bert", vocab_size=400, max_position_embeddings=48, **SIZES)
        BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    train(recipe, tmp_path / "few", *write(*[1] * 12), "--validation_split_percentage", 20)
    assert "unknown" not in capsys.readouterr().err
    for output in ("many", "many again, from the cache"):
        train(recipe, tmp_path / output, *write(*[3] * 12), "--validation_split_percentage", 20)
        warning = f"warning: 30% of the tokens of --train_file {tmp_path / 'train.csv'} are unknown to the tokenizer"
        assert warning in capsys.readouterr().err
    message = runs.refusal(train, recipe, tmp_path / "all", *write(*[10] * 12))
    assert message.startswith(f"--train_file {tmp_path / 'train.csv'}: every word is unknown to the tokenizer")


# Padding


def bytes_tokenizer(texts, **special):
    """A byte-level BPE tokenizer as decoders have: its only special token ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, **special)


def write_decoder(folder, kind, rows, **special):
    """Write a tokenizer and a decoder with random weights, large enough for its logits to depend on the text."""
    tokenizer = bytes_tokenizer([row["text"] for row in rows], **special)
    positions = {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
    names = {"gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2}}.get(kind, SIZES | {"num_key_value_heads": 1})
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), num_labels=4, **positions, **names, **dropout)
    config.pad_token_id = None
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ending(texts, tmp_path_factory):
    """Rows of the texts; some contain, and some end with, the token with which a decoder's tokenizer ends texts."""
    folder, written, flags = tmp_path_factory.mktemp("ending"), [], []
    for flag, file in (texts[:2], texts[2:]):
        rows = read_csv(file)[:60]
        for row in rows[::5]:
            row["text"] = row["text"][:40] + END
        for row in rows[1::5]:
            row["text"] = row["text"][:9] + END + row["text"][9:30]
        flags += [flag, write_jsonl((folder / file.name).with_suffix(".jsonl"), rows)]
        written.append(rows)
    return flags, *written


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.docs), "qwen2"])
def test_decoders_train_the_same_for_any_micro_batches_and_their_export_gives_the_score(ending, tmp_path, capsys, kind):
    flags, rows, validation = ending
    model = write_decoder(tmp_path / "model", kind, rows)
    several = ["--max_train_steps", 4, "--eval_steps", 4, "--logging_steps", 1, "--checkpointing_steps", "no"]
    several += ["--model_name_or_path", model, "--max_tokens_per_micro_batch"]
    runs_of = [tmp_path / "48", tmp_path / "576"]
    results = [runs.train("nlp", run, *runs.TINY, *flags, *several, run.name) for run in runs_of]
    assert kind == "qwen2" or f"its tokenizer has no padding token; {END} is used" in capsys.readouterr().err
    assert runs.losses(runs_of[0]) == pytest.approx(runs.losses(runs_of[1]), rel=1e-4)
    assert runs.distance(*map(runs.weights, runs_of)) < 1e-4

    exported = AutoModelForSequenceClassification.from_pretrained(runs_of[0] / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(runs_of[0] / "model")
    assert exported.config.pad_token_id == tokenizer.pad_token_id == 0
    texts = [row["text"] for row in validation]
    logits = logits_of(runs_of[0] / "model", texts)
    targets = torch.tensor([exported.config.label2id[row["label"]] for row in validation])
    loss = torch.nn.functional.cross_entropy(logits, targets)
    assert results[0]["eval_loss"] == pytest.approx(float(loss), abs=1e-5)
    with torch.inference_mode():
        padded = exported(**tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")).logits
    assert (padded - logits).abs().max() < 1e-4
    assert logits.std(0).min() > 0.05, "the logits differ between texts"


def test_a_config_without_a_padding_token_takes_that_of_the_tokenizer(ending, tmp_path):
    flags, rows, _ = ending
    model = write_decoder(tmp_path / "model", "gpt2", rows, pad_token="!")
    train("nlp", tmp_path / "run", *flags, "--model_name_or_path", model, "--max_train_steps", 1)
    config = AutoConfig.from_pretrained(tmp_path / "run/model")
    assert config.pad_token_id == AutoTokenizer.from_pretrained(tmp_path / "run/model").convert_tokens_to_ids("!")


def test_a_tokenizer_without_padding_and_end_tokens_is_refused(ending, tmp_path):
    _, rows, _ = ending
    tokenizer = bytes_tokenizer([row["text"] for row in rows])
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    assert "neither a padding nor an end-of-sequence token" in runs.refusal(load_tokenizer, str(tmp_path))


def test_a_tokenizer_that_drops_latin_letters_is_refused_where_its_special_tokens_are_needed():
    backend = Tokenizer(models.BPE({"[CLS]": 0, "[SEP]": 1, "中": 2}, []))
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]")
    assert "does not put its special tokens around a text" in runs.refusal(special_tokens_around, tokenizer)
