"""The benchmarks of large data and of scaling start the right processes, count correctly, and write what they find."""

import json
import sys

import pytest

from benchmarks import scale, scaling


def test_it_writes_a_row_per_size_and_the_processes_read_each_sample_once(monkeypatch, tmp_path):
    words = ["--rounds", 1, "--steps", 2, "--global_batch_size", 64, "--processes", 12, "--samples", 1000, 3000]
    words += ["--images_per_process", *scale.BATCHES]
    monkeypatch.setattr(sys, "argv", ["scale.py", *map(str, words), "--output_dir", str(tmp_path / "out")])
    scale.main()
    report = json.loads((tmp_path / "out/scale.json").read_text())
    assert [(row["contestant"], row["samples"]) for row in report["rows"]] == [("1,000", 1000), ("3,000", 3000)]
    assert all(row[figure] > 0 for row in report["rows"] for figure in scale.FIGURES)
    assert report["comparisons"]["step_cpu_ms, 3,000 / 1,000 samples"]["median"] == pytest.approx(
        report["rows"][1]["step_cpu_ms"] / report["rows"][0]["step_cpu_ms"]
    )
    for each in scale.BATCHES:
        for of in ("samples", "images"):
            found = report["comparisons"][f"CPU ms of one of 12 processes, {12 * each:,} {of} (each sample once)"]
            assert found["each_sample_once"]
    assert "| 3,000 | " in (tmp_path / "out/scale.md").read_text()
    assert not (tmp_path / "out/runs/lengths").exists()


def row(processes, rate, variant="plain", link=0.0, step=1.0, share=0.1):
    found = {"processes": processes, "link_mbit": link, "variant": variant, "samples_per_second": rate}
    found |= {"step_seconds": step, "communication_share": share}
    return found | {"data_wait_share": 0.0, "peak_memory_bytes": 2.0**20}


def test_rows_are_medians_and_efficiency_is_against_the_fewest_processes():
    found = [row(1, rate) for rate in (8.0, 12.0, 10.0)] + [row(2, rate) for rate in (15.0, 16.0, 99.0)]
    one, two = scaling.summarize(found)
    assert (one["samples_per_second"], two["samples_per_second"]) == (10, 16)
    assert two["samples_per_second_spread"] == [15, 99]
    assert (one["scaling_efficiency"], two["scaling_efficiency"]) == (1, 16 / 20)
    assert one["repeats"] == 3


@pytest.mark.parametrize("steps", [7, 10, 11])
def test_steps_that_give_a_shorter_last_window_are_refused(steps, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--steps", str(steps)])
    with pytest.raises(SystemExit):
        scaling.main()
    assert f"--steps {steps}: give a multiple of 3" in capsys.readouterr().err
    assert not any(n % scaling.window(n) for n in (1, 2, 3, 4, 5, 6, 9, 12, 30))
