"""Short forms of two campaigns of `make campaign`; docs/checkpoints.md lists the tests of `make test` for each."""

import sys

import pytest
import runs

sys.path.insert(0, str(runs.ROOT / "tests/campaigns"))

import kills
import signals

pytestmark = pytest.mark.docs  # their commands stand in docs/checkpoints.md


def test_killed_at_a_random_instant_a_run_ends_with_the_same_weights(texts, tmp_path):
    tally = kills.campaign(1, 1, tmp_path, texts, steps=60)  # two processes: checkpoints/test_resuming.py
    assert not tally.failures
    assert tally.kills == sum(row.survived for row in tally.rows.values()) == 1


def test_told_to_end_in_an_evaluation_with_its_children_a_run_goes_on(tmp_path):
    table = signals.campaign(tmp_path, 2, ["evaluation-12"], ["their children too"])
    assert not table.failures
    (row,) = table.rows.values()
    assert (row.tried, row.survived, row.repeated) == (1, 1, 0)
