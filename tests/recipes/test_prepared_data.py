"""recipes/mlm.py trains on prepared data behind a URL exactly as on files, and ends with one line when it cannot."""

import os
import re

import pytest
import runs
from datasets import Dataset, DatasetDict
from range_server import RangeServer
from s3_server import S3Server

from shared import prepare
from shared.errors import UserError
from shared.remote import object_store
from shared.text import prepared_folder

MLM = runs.ROOT / "recipes/mlm.py"
STEPS = [*runs.TINY, "--checkpointing_steps", 4]
SMALL_CACHE = ["--cache_gb", "0.00001"]  # 10 kB of 23; a step needs a few
TOKENS = "training/tokens.npy"


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """The prepared texts, in small blocks."""
    target = tmp_path_factory.mktemp("prepared") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(prepared_folder, "BLOCK_BYTES", 128)
        prepare.prepare(MLM, [*map(str, texts), *runs.TINY], (0, 1), target)
    assert (target / TOKENS).exists()
    return target


@pytest.fixture(autouse=True)
def short_pauses(own_cache, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)


def train(mlm, output, *flags):
    runs.train(mlm, output, *flags)
    return runs.exported(output)


def test_a_run_from_a_url_resumes_one_from_a_folder_and_ends_with_the_bytes_of_one_from_files(
    mlm, texts, folder, tmp_path
):
    """With a cache smaller than an epoch, and errors that pass."""
    expected = train(mlm, tmp_path / "files", *texts, *STEPS)
    assert train(mlm, tmp_path / "folder", *STEPS, "--prepared_data", folder) == expected
    middle = tmp_path / "folder/checkpoints/step_00000004"
    with RangeServer(folder, answer=lambda path, count: 503 if "tokens" in path and count < 2 else None) as server:
        url = ["--prepared_data", server.url, *SMALL_CACHE]
        assert train(mlm, tmp_path / "url", *STEPS, *url, "--resume_from_checkpoint", middle) == expected
        assert server.requests[TOKENS] > 2
    last = [runs.training_lines(tmp_path / name)[-1] for name in ("files", "folder", "url")]
    assert len({line["samples"] for line in last}) == 1


def test_flags_without_effect_on_prepared_data_and_another_tokenizer_are_refused(mlm, folder, texts):
    for flags, expected in (
        (["--vocab_size", 500], f"--vocab_size 500: --prepared_data {folder} was prepared with 400"),
        (["--tokenizer_type", "bpe"], "--tokenizer_type bpe: .* was prepared with wordpiece"),
        (["--text_column_name", "body"], "--text_column_name body has no effect on --prepared_data"),
        (["--cache_gb", 1], "--cache_gb 1 has no effect on --prepared_data .*, a folder here"),
        (texts[:2], "--prepared_data .* and --train_file .* exclude each other"),
        (["--dataset_name", "x"], "--prepared_data .* and --dataset_name x exclude each other"),
    ):
        with pytest.raises(UserError, match=expected):
            runs.prepared(mlm, [*runs.TINY, "--prepared_data", folder, *flags])


def test_a_model_must_have_the_tokenizer_of_the_data(mlm, texts, folder, tmp_path):
    model = runs.write_bert_with_dropout(tmp_path / "bert", texts)  # its tokenizer has the settings of the data
    named = ["--model_name_or_path", model]
    runs.prepared(mlm, [*runs.TINY, *named, "--prepared_data", folder])
    of_model = tmp_path / "of_model"
    prepare.prepare(MLM, list(map(str, [*texts, *runs.TINY, *named])), (0, 1), of_model)
    with pytest.raises(UserError, match="was prepared with the tokenizer of a model: give its --model_name_or_path"):
        runs.prepared(mlm, [*runs.TINY, "--prepared_data", of_model])
    vocabulary = model / "tokenizer.json"
    vocabulary.write_text(re.sub(r'"##e"', '"##é"', vocabulary.read_text()))
    with pytest.raises(UserError, match="prepared with another tokenizer than that of --model_name_or_path"):
        runs.prepared(mlm, [*runs.TINY, *named, "--prepared_data", of_model])


def test_the_prepare_command_writes_both_of_two_equal_splits_and_only_documents(texts, tmp_path):
    same = Dataset.from_dict({"text": ["a b c", "d e f"]})
    DatasetDict(train=same, validation=same).save_to_disk(tmp_path / "both")
    prepare.prepare(MLM, [*runs.TINY, "--dataset_name", str(tmp_path / "both")], (0, 1), tmp_path / "data")
    assert (tmp_path / "data/validation/tokens.npy").exists()
    with pytest.raises(UserError, match=r"--to .*x has no effect on .*nlp\.py with these flags, which read no doc"):
        prepare.prepare(runs.ROOT / "recipes/nlp.py", [*map(str, texts), *runs.TINY], (0, 1), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.fixture
def bucket(folder):
    """The environment of clients of an S3 server with the prepared data, and a client."""
    with S3Server("corpus") as server:
        client = server.client()
        for path in filter(os.path.isfile, folder.rglob("*")):
            client.upload_file(str(path), "corpus", f"a/{path.relative_to(folder)}")
        yield server.environment, client


@pytest.mark.docs
def test_a_run_from_an_s3_bucket_ends_with_the_bytes_of_files(texts, folder, tmp_path, bucket):
    environment, client = bucket
    expected = runs.exported(runs.run_many(2, {"files": [*texts, *STEPS]}, tmp_path, MLM)["files"])
    flags = [*STEPS, "--prepared_data", "s3://corpus/a", *SMALL_CACHE]
    workers = ["--dataloader_num_workers", 2, "--output_dir", tmp_path / "workers"]  # a forked process has none
    on_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    runs.succeed(runs.torchrun(2, MLM, *flags, *workers), **environment, **on_cpu)
    assert runs.exported(tmp_path / "workers") == expected
    client.delete_object(Bucket="corpus", Key=f"a/{TOKENS}")
    for url, name in (("s3://corpus/a", TOKENS), ("s3://nowhere/a", "index.json")):
        codes, text = runs.run_forked(
            2, MLM, [*STEPS, "--prepared_data", url, "--output_dir", tmp_path / "missing"], tmp_path, **environment
        )
        assert codes == [2, 2], text
        assert f"error: --prepared_data {url}/{name} does not exist" in text
        assert "Traceback" not in text
