"""The budget of a micro-batch changes the losses of a run by rounding only, so a GPU may take a larger one."""

import pytest
import runs

BUDGETS = {"nlp": (96, 4096), "mlm": (200, 8192)}  # several micro-batches per step, and one


@pytest.mark.parametrize("recipe", BUDGETS)
def test_losses_are_the_same_with_two_budgets(recipe, texts, tmp_path):
    found = []
    for budget in BUDGETS[recipe]:
        output = tmp_path / str(budget)
        runs.train(recipe, output, *runs.TINY, *texts, "--max_tokens_per_micro_batch", budget, "--logging_steps", 1)
        lines = runs.metrics(output)
        found.append([line[key] for line in lines for key in ("loss", "grad_norm", "eval_loss") if key in line])
    assert len(found[0]) == 2 * 8 + 1
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] != found[1], "the budget has no effect"
