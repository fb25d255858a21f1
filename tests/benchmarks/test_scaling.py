"""The scaling benchmark starts the right processes and counts correctly."""

import sys

import pytest

from benchmarks import scaling


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
