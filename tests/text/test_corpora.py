"""A corpus becomes tokens: from any source, in little memory, without a loss."""

import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from toy_data import WORDS, word_tokenizer

from shared.cache import prepared
from shared.datasets import readers as readers_module
from shared.datasets import rows
from shared.datasets.rows import ROW_COLUMN, named, numbered
from shared.datasets.tables import split
from shared.options.data_options import DataOptions
from shared.text import corpus as corpus_module
from shared.text import encoder
from shared.text import tokenized as tokenized_module
from shared.text.corpus import of_files
from shared.text.encoder import Encoder
from shared.text.token_files import tokenize_documents
from shared.text.tokenized import train_tokenizer

TEXTS = [" ".join(WORDS[i * k % 8] for k in range(i % 23)) for i in range(300)]  # one in 23 has no text
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
FEW = 9  # documents in a small file
SMALL = {
    (corpus_module, "GROUP_BYTES"): 2000,
    (tokenized_module, "BLOCK_DOCUMENTS"): 30,
    (encoder, "BATCH_ROWS"): 10,
    (readers_module, "BLOCK_BYTES"): 300,
    (rows, "IN_MEMORY"): 1000,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, own_cache):
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def files(tmp_path):
    """A folder with a text file of many parts, JSON lines in one compressed part with many blocks, and Parquet."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text(ROWS)
    (folder / "b.jsonl.zst").write_bytes(pa.compress(ROWS.encode(), codec="zstd", asbytes=True))
    for name in ("small-1.txt", "small-2.txt"):
        (folder / name).write_text("\n".join(TEXTS[:FEW]))
    pq.write_table(pa.table({"text": TEXTS}), folder / "c.parquet", row_group_size=50)
    return folder


def tokenized(files):
    """The tokens of all files of a folder."""
    return tokenize_documents(of_files([f"{files}/*.*"], "--train_file", "text"), word_tokenizer())


def spans(corpus):
    """The tokens of each document."""
    tokens = corpus.tokens[:]
    return [tokens[a:b].tolist() for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]


def of_texts(texts, tokenizer):
    return tokenize_documents(named(pa.table({"text": texts}), "here"), tokenizer)


def test_the_corpus_has_the_tokens_of_the_documents_in_their_order_and_is_made_once(files, monkeypatch):
    tokenized(files)
    assert not [*prepared.cache_dir().glob("*.partial-*"), *prepared.cache_dir().glob("*.blocks/*")]
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenized again"))
    corpus, tokenizer = tokenized(files), word_tokenizer()
    expected = [tokenizer(text)["input_ids"] for text in [*TEXTS * 3, *TEXTS[:FEW] * 2] if text]
    assert spans(corpus) == expected
    assert corpus.digest == "9cbf5f22889a7fc833f2c4577544ea94", "as in all versions"


def test_a_written_mask_token_stays_text_and_documents_without_text_are_skipped(capsys):
    texts = ["The first text.", "", "   ", "Ünïcode — and [MASK] it is."]
    tokenizer = train_tokenizer(pa.table({"text": [text for text in texts if text.strip()]}), ("text",), "bpe", 400, 32)
    corpus = of_texts(texts, tokenizer)
    first, last = spans(corpus)
    assert first == tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    assert tokenizer.mask_token_id in tokenizer(texts[3])["input_ids"]
    assert not {*tokenizer.all_special_ids} & {*last}
    assert "here: 2 documents without text are skipped" in capsys.readouterr().err
    for _ in range(2):
        assert "here contains no text: its 2 documents have no tokens" in runs.refusal(of_texts, ["", " "], tokenizer)


# Parts


def test_a_held_out_part_is_a_function_of_the_seed_and_limits_keep_some_documents_of_each_part(capsys):
    corpus = of_texts(["one two"] * 50, word_tokenizer())

    def numbers(count=1, **changes):
        parts = split([corpus.documents("here")] * count, DataOptions(**changes))
        return [numbered(documents)[ROW_COLUMN].to_pylist() for documents in parts]

    train, held = numbers()
    assert (sorted([*train, *held]), len(held)) == ([*range(50)], 5)
    assert "here has no validation data: 5 of its rows (10 %, chosen by --seed 0)" in capsys.readouterr().err
    assert numbers()[1] == held != numbers(seed=1)[1]
    limited = numbers(max_train_samples=7, max_eval_samples=2)
    assert [len(part) for part in limited] == [7, 2]
    assert {*limited[0]} <= {*train}
    assert {*limited[1]} <= {*held}
    assert [len(part) for part in numbers(2, max_eval_samples=3)] == [50, 3]
    one = of_texts(["one"], word_tokenizer()).documents("here")
    assert "here has one row: add rows" in runs.refusal(split, [one], DataOptions())


IN_LITTLE_MEMORY = """
import resource, sys
import pyarrow.csv, pyarrow.parquet, torch
from toy_data import word_tokenizer
from shared.plan.batches import Plan
from shared.text.corpus import of_files
from shared.text.token_files import MaskedDocuments, tokenize_documents
from shared.plan.loading import Loader
from shared.text.masking import masking_for
from shared.encoders.packing import Packing

tokenizer = word_tokenizer()
tokenizer("one two")
in_use = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()  # data and stack
limit = in_use + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # anonymous memory; maps of files are not counted
file = tokenize_documents(of_files([sys.argv[1]], "--train_file", "text"), tokenizer)
data = MaskedDocuments(file, file.documents("texts"), 4096, ([], []), masking_for(tokenizer, 0.3), 0)
plan = Plan(lengths=data.lengths, weights=data.masked, packed=True, seed=0, global_batch_size=64, max_steps=3)
loader = Loader(data, plan, Packing(), torch.device("cpu"))
read = sum(batch["input_ids"].numel() for step in range(3) for _, batch in loader.micro_batches(step))
print(len(file.tokens), len(file.offsets) - 1, read)
"""


@pytest.mark.docs  # it starts a process without the modules of the others
@pytest.mark.parametrize("kind", ["txt", "parquet", "jsonl.zst"])
def test_a_corpus_larger_than_memory_is_tokenized_and_read(kind, tmp_path):
    """The process may use `memory` bytes more than its imports, and the text is larger."""
    memory = 96 << 20
    line, lines = "one two " * 60 + "x" * 7000, 16_000
    path = tmp_path / f"corpus.{kind}"
    if kind == "parquet":
        table = pa.table({"text": [line] * 100})
        with pq.ParquetWriter(path, table.schema, use_dictionary=False, compression="none") as to:
            for _ in range(lines // 100):
                to.write_table(table)
    else:
        row = line if kind == "txt" else json.dumps({"text": line})
        with pa.output_stream(path) as file:  # compresses what the name of the file says
            for _ in range(lines):
                file.write(f"{row}\n".encode())
    assert lines * len(line) > 1.15 * memory
    packages = os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests")])
    out = runs.succeed([sys.executable, "-c", IN_LITTLE_MEMORY, path, memory], PYTHONPATH=packages)
    assert out.splitlines()[-1].split()[:2] == [str(121 * lines), str(lines)], out
