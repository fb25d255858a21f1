"""`recipes/nlp.py` packs texts: it computes no padding, and its evaluation is that of each text alone.

test_exactness.py tests that its weights are those of padded rows, on any number of processes, and
test_resumed_recipes.py that it resumes exactly.
"""

import pytest
import runs
from one_text_at_a_time import loss_of

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")


@pytest.fixture(scope="module")
def bert(texts, tmp_path_factory):
    """The flag of a BERT with dropout."""
    return ["--model_name_or_path", runs.write_bert_with_dropout(tmp_path_factory.mktemp("bert") / "model", texts)]


def test_a_micro_batch_is_full_of_real_tokens_and_evaluation_is_that_of_each_text_alone(
    train, bert, texts, tmp_path, capfd
):
    for name, flags in {"packed": [], "padded": ["--no_packing"]}.items():
        results = train(tmp_path / name, *bert, *flags, "--logging_steps", 1)
        said, lines = capfd.readouterr().out, runs.training_lines(tmp_path / name)
        padding = [line["padding"] for line in lines]
        assert ("packed without padding, attention over documents padded to" in said) == (name == "packed")
        assert len(padding) == 8
        assert (max(padding) == 0) == (name == "packed")
        assert results["eval_loss"] == pytest.approx(loss_of(tmp_path / name / "model", texts[3]), rel=1e-5)
