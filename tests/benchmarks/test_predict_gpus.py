"""The prediction for many GPUs uses the right sizes, follows its model, and reproduces published scaling."""

import json
import sys

import pytest
import runs
import torch
from transformers import BertConfig, BertForMaskedLM, ResNetConfig, ResNetForImageClassification

sys.path.insert(0, str(runs.ROOT))

from benchmarks import predict_gpus
from benchmarks.harness import scaling_model
from benchmarks.harness.published import DGX_A100, INFINIBAND, TABLES, Run, Scaling
from benchmarks.harness.scaling_model import Work


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_models_have_as_many_parameters_as_the_prediction_counts():
    with torch.device("meta"):
        bert = BertForMaskedLM(BertConfig(vocab_size=30_528))
        resnet = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    assert parameters(bert) == predict_gpus.BERT
    assert parameters(bert.bert.embeddings) == predict_gpus.BERT_EMBEDDINGS
    assert parameters(resnet) == predict_gpus.RESNET


def test_the_computation_is_the_measured_step_of_one_gpu():
    one, four = predict_gpus.bert_base(1), predict_gpus.bert_base(4)
    assert one.units == pytest.approx(64 * 512)
    assert one.work.computation == predict_gpus.measured("bert_base", "step_seconds")
    assert four.work.backward == pytest.approx(one.work.backward)
    assert four.work.computation == pytest.approx(4 * one.work.computation - 3 * one.work.update)
    assert one.state_bytes == pytest.approx(predict_gpus.measured("bert_base_checkpoints", "checkpoint_bytes"), 1e-3)


def test_the_newest_figure_counts_and_one_that_is_missing_is_an_error(monkeypatch):
    rows = [[{"benchmark": "a", "rate": 1.0}], [{"benchmark": "a", "rate": 2.0}], [{"benchmark": "a"}]]
    monkeypatch.setattr(predict_gpus, "entries", lambda: [{"rows": part} for part in rows])
    assert predict_gpus.measured("a", "rate") == 2.0
    assert predict_gpus.measured("b", "rate", 3.0) == 3.0
    with pytest.raises(AssertionError, match="b has no rate"):
        predict_gpus.measured("b", "rate")


# What the plan, checkpoints and preparation add


def write_plans(folder, model, seconds):
    """The plan of a step of `model` takes `seconds` per process on 4,096 processes, and half of it on 8."""
    rows = [
        {"processes": n, "global_batch_size": n * model.samples, "kind": model.kind, "median": 1000 * seconds * share}
        for n, share in ((8, 0.5), (4096, 1.0))
    ]
    other = {"processes": 8, "global_batch_size": 8, "kind": model.kind, "median": 1e9}
    report = {"comparisons": dict(enumerate([*rows, other, {"median": 1.0}]))}
    (folder / "scale_processes.json").write_text(json.dumps(report))


def test_a_step_is_at_least_as_long_as_its_plan(monkeypatch, tmp_path):
    model, network = predict_gpus.bert_base(1), next(iter(predict_gpus.NETWORKS))
    monkeypatch.setattr(predict_gpus, "RESULTS", tmp_path)
    for share in (0.1, 10):
        write_plans(tmp_path, model, share * model.work.computation)
        row = predict_gpus.predicted(4096, model, network)
        assert row["plan_seconds"] == pytest.approx(share * model.work.computation)
        expected = row["efficiency"] if share < 1 else 1 / share
        assert row["efficiency_with_plan"] == pytest.approx(expected)
        of_ideal = row["units_per_second"] / (4096 * model.units / model.work.computation)
        assert of_ideal == pytest.approx(expected)
    middle = predict_gpus.plan_seconds((8 + 4096) // 2, model)
    assert middle == pytest.approx(0.75 * 10 * model.work.computation)


def test_a_save_costs_the_copy_of_its_bytes():
    for row in predict_gpus.checkpoints():
        assert row["copy_seconds"] == pytest.approx(row["bytes"] / predict_gpus.ceiling("to_host"))
        assert row["copy_seconds_shared"] == pytest.approx(row["copy_seconds"] / 8)
        assert 0 < row["share_of_time"] < row["copy_seconds"]
        assert row["write_seconds"] > row["copy_seconds"]


def test_preparation_takes_longer_compared_with_an_epoch_on_more_gpus():
    found = predict_gpus.preparation()
    eight, most = found["times_an_epoch"][8], found["times_an_epoch"][4096]
    assert most > eight
    assert most <= eight * 4096 / 8
    row = predict_gpus.predicted(8, predict_gpus.bert_base(1), next(iter(predict_gpus.NETWORKS)))
    assert eight * found["tokens_per_second"] == pytest.approx(row["units_per_second"])


# Published scaling


@pytest.mark.parametrize("overlap", [False, True])
def test_a_table_that_follows_the_model_is_predicted_exactly(overlap):
    update_bytes, gradients, micro_batch = 1e10, 1e9, 0.3
    update = update_bytes / (predict_gpus.MEMORY_SHARE * predict_gpus.A100_MEMORY)

    def run(gpus, count):
        late = 0.0 if overlap else gradients
        work = Work(count * micro_batch + update, gradients, late, count, update)
        step = scaling_model.predict(gpus, work, DGX_A100)["step_seconds"]
        return Run(gpus, 16 * count * gpus / step, count)

    gpus = [1, 8, 64] if overlap else [8, 16, 256]
    table = Scaling("", "", 16, gradients, [run(n, 32 // max(1, n // 8)) for n in gpus], overlap, update_bytes)
    assert [row["error"] for row in predict_gpus.compare(table)] == pytest.approx([0, 0], abs=1e-9)


def test_published_scaling_is_reproduced_within_five_percent_or_the_difference_is_explained():
    found = [row for table in TABLES for row in predict_gpus.compare(table)]
    published = {round(row["published"], 3) for row in found if abs(row["error"]) <= predict_gpus.NEAR}
    assert {0.989, 0.949} <= published
    assert all(row["difference"] for row in found if abs(row["error"]) > predict_gpus.NEAR)
    explained = [table for table in TABLES if table.difference]
    for table in explained:  # no explanation without a difference
        assert max(abs(row["error"]) for row in predict_gpus.compare(table)) > predict_gpus.NEAR


def test_the_networks_have_machines_of_eight_gpus_and_ethernet_is_the_slower_one():
    fast, slow = predict_gpus.NETWORKS.values()
    assert fast == INFINIBAND
    assert fast.ranks_per_machine == slow.ranks_per_machine == 8
    assert slow.bandwidth < fast.bandwidth < 8 * fast.machine_bandwidth


def test_it_writes_a_row_per_model_network_and_number_of_gpus_and_says_that_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["predict_gpus.py", "--output_dir", str(tmp_path)])
    predict_gpus.main()
    report = json.loads((tmp_path / "predict_gpus.json").read_text())
    rows = report["predictions"]
    assert len(rows) == 3 * 2 * len(scaling_model.COUNTS)
    for row in rows:
        assert 0 < row["efficiency_without_overlap"] <= row["efficiency"] < 1
        assert row["efficiency_with_plan"] <= row["efficiency"]
    page = (tmp_path / "predict_gpus.md").read_text()
    assert page.startswith("Predicted, not measured.")
    assert page.count("| 4,096 |") == 3 * 2 + 1
    for about in ("BERT-large, 128 tokens | 1 to 8 | 98.9% |", "65,536 per step | 8 to 256 | 94.9% |"):
        assert about in page
