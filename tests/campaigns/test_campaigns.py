"""Short forms of the campaigns of `make campaign`."""

import sys

import pytest
import runs
import toy_data

sys.path.insert(0, str(runs.ROOT / "tests/campaigns"))

import damage
import kills
import signals
import worlds

pytestmark = pytest.mark.docs  # docs/checkpoints.md has the commands of the campaigns


@pytest.mark.parametrize("recipe", toy_data.RECIPES)
def test_a_run_killed_at_a_random_instant_and_resumed_ends_with_the_same_weights(tmp_path, recipe):
    table = kills.campaign(tmp_path, 1, 2, recipe, steps=40)  # two processes: one would use all cores
    assert not table.failures
    (row,) = table.rows.values()
    assert (row.tried, row.survived) == (1, 1)


def test_a_run_resumes_after_sigterm_to_all_processes_and_their_children_in_a_save_and_an_evaluation(tmp_path):
    table = signals.campaign(tmp_path, 2, ["save-8", "evaluation-12"], ["their children too"])
    assert not table.failures
    assert [(row.tried, row.survived, row.repeated) for row in table.rows.values()] == [(1, 1, 0), (1, 1, 0)]


def test_a_run_survives_a_full_disk_and_waits_for_another_one_in_its_folder(tmp_path):
    table = damage.campaign(tmp_path, 2, files=[], strays=[], disks=["no space for a checkpoint"], twice=["ends"])
    assert not table.failures
    cases = 1 if table.remark else 2  # without the full disk where no file system can be mounted
    assert [(row.tried, row.survived) for row in table.rows.values()] == [(1, 1)] * cases


@pytest.mark.parametrize("recipe", toy_data.RECIPES[1:])  # nlp.py: recipes/test_exactness.py
def test_each_sample_is_used_once_when_the_number_of_processes_changes_within_an_epoch(tmp_path, recipe):
    table = worlds.campaign(tmp_path, 1, recipe, ways=["SIGKILL"])
    assert not table.failures
    (row,) = table.rows.values()
    assert (row.tried, row.survived) == (1, 1)
