"""Each family of docs/models.md, tiny and with random weights, trains in both text recipes and loads from the export.

The results must equal the rows of that page's table.
"""

import families
import numpy as np
import pytest
import runs
import torch
import transformers
from families import FAMILIES
from predicting import read_csv
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer

from shared.config import options

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")
PAGE, LONGEST = runs.ROOT / "docs/models.md", 48
FLAGS = [
    *("--max_length", LONGEST, "--max_tokens_per_micro_batch", 192, "--global_batch_size", 12, "--logging_steps", 2),
    *("--max_train_steps", 2, "--eval_steps", 2, "--checkpointing_steps", "no", "--learning_rate", 1e-3),
]


@pytest.fixture(scope="module")
def corpus(texts, alone):
    """The flags of the texts, the tokenizer of a tiny run, and the validation rows."""
    return texts, AutoTokenizer.from_pretrained(alone / "model"), read_csv(texts[3])


def trained(recipe, corpus, folder, family, auto, capfd):
    """(config, evaluation, printed output, exported model, its tokenizer)."""
    module = runs.load_recipe(recipe)
    flags, tokenizer, _ = corpus
    # Qwen2's class adds a token of its own to any tokenizer; published vocabularies have room as well.
    families.tiny(auto, family, len(tokenizer) + 8).save_pretrained(folder / "model")
    side = "left" if family == "XLNet" else "right"  # as published
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = side
    tokenizer.save_pretrained(folder / "model")
    given = [*flags, *FLAGS, "--model_name_or_path", folder / "model", "--output_dir", folder / "run"]
    config = options.parse(module.Config, [*map(str, given)])
    results = module.main(config)
    output = "".join(capfd.readouterr())
    exported, loading = auto.from_pretrained(folder / "run/model", output_loading_info=True)
    assert not [names for kind, names in loading.items() if names and kind != "error_msgs"], loading
    return config, results, output, exported.eval(), AutoTokenizer.from_pretrained(folder / "run/model")


def classifies(*case):
    """What the table says of nlp.py. The exported model must give the evaluation's loss and accuracy, text by text."""
    _, results, output, model, tokenizer = trained("nlp", *case[:3], families.CLASSIFIER, case[3])
    padding = {"padding": "max_length"} if "padding changes the output" in output else {}
    logits, rows = [], case[0][2]
    with torch.inference_mode():
        for row in rows:
            given = tokenizer(row["text"], truncation=True, max_length=LONGEST, return_tensors="pt", **padding)
            logits.append(model(**given).logits[0])
    logits = torch.stack(logits)
    targets = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    assert results["eval_loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)
    assert results["eval_accuracy"] == pytest.approx((logits.argmax(1) == targets).float().mean().item())
    assert logits.std(0).max() > 0.003, "the logits differ between texts"
    return "yes" + ", padded to `--max_length`" * bool(padding), output


def fills_in(*case):
    """What the table says of mlm.py. The exported model must give the evaluation's loss, document by document."""
    if AutoConfig.for_model(FAMILIES[case[2]][0]).__class__ not in families.MASKED_LM._model_mapping:
        return "no such model in transformers", ""
    config, results, output, model, tokenizer = trained("mlm", *case[:3], families.MASKED_LM, case[3])
    packed, padded = "packed without padding" in output, "padding changes the output" in output
    assert packed != ("cannot be packed exactly" in output)
    _, held_out, _ = runs.load_recipe("mlm").load_data(config)
    losses = []
    with torch.inference_mode():
        for piece in range(len(held_out)):
            _, tokens, _, labels, masked = held_out.read_micro_batch(np.array([piece]), np.zeros(1, np.int64))
            ids = {"input_ids": tokens.tolist()}
            given = tokenizer.pad(ids, padding="max_length", max_length=LONGEST) if padded else ids
            logits = model(**{name: torch.tensor(values)[None] for name, values in given.items()}).logits[0, masked]
            losses.append(F.cross_entropy(logits, torch.from_numpy(labels), reduction="none"))
    assert results["eval_loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    return ("packed" if packed else "one document per row") + ", padded to `--max_length`" * padded, output


def frozen(output):
    """The names of the frozen layers, or of parameters that are no weights or biases of one, without their paths."""
    lines = [line.partition(": ")[2] for line in output.splitlines() if line.startswith("frozen, because")]
    names = [name.split(" ")[0].split(".") for line in lines for name in line.split(", ")]
    layers = [name[:-1] if name[-1] in ("weight", "bias") else name for name in names]
    return sorted({layer[-2] if layer[-1] == "dense" else layer[-1] for layer in layers})


# Their rows repeat that of a family with the same layers, or of decoders, which test_tokenizers.py trains as well.
SIMILAR = ("ELECTRA", "XLM-R", "CamemBERT", "MPNet", "Nystromformer", "MobileBERT", "GPT-2", "Llama", "Qwen2")
CASES = [pytest.param(family, marks=[pytest.mark.docs] * (family in SIMILAR)) for family in FAMILIES]


@pytest.mark.parametrize("family", CASES)
def test_each_family_behaves_as_its_row_in_the_table_says(corpus, tmp_path, capfd, family):
    nlp, output_of_nlp = classifies(corpus, tmp_path / "nlp", family, capfd)
    mlm, output_of_mlm = fills_in(corpus, tmp_path / "mlm", family, capfd)
    notes = [f"`{name}` frozen" for name in frozen(output_of_nlp)]
    notes += [f"`{name}` frozen in mlm.py" for name in frozen(output_of_mlm) if name not in frozen(output_of_nlp)]
    notes += ["attends to all tokens"] * ("attends to all tokens" in output_of_nlp)
    row = f"| {family} | `{FAMILIES[family][0]}` | {nlp} | {mlm} | {', '.join(notes)} |".replace("|  |", "| |")
    assert row in table()


def test_the_page_has_no_other_families_and_names_the_tested_version():
    assert [row.split(" | ")[0].removeprefix("| ") for row in table()] == list(FAMILIES)
    assert f"transformers {transformers.__version__}" in PAGE.read_text()


def table():
    """The rows of the page's table of families."""
    _, _, rows = PAGE.read_text().partition("| mlm.py | messages |\n|---|---|---|---|---|\n")
    return rows.partition("\n\n")[0].splitlines()
