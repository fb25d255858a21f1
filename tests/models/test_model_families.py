"""Each family of docs/models.md, tiny and with random weights, trains in both text recipes and loads from the export.

The results must equal the rows of that page's table.
"""

import csv

import families
import numpy as np
import pytest
import runs
import torch
import transformers
from families import FAMILIES
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from shared.config import options

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")
LONGEST = 48
FLAGS = [
    *("--max_length", LONGEST, "--max_tokens_per_micro_batch", 192, "--global_batch_size", 12, "--logging_steps", 2),
    *("--max_train_steps", 2, "--eval_steps", 2, "--checkpointing_steps", "no", "--learning_rate", 1e-3),
]


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory):
    """A few rows of the texts, and the tokenizer of a tiny run."""
    folder, flags = tmp_path_factory.mktemp("families"), []
    for flag, file, rows in ((*texts[:2], 48), (*texts[2:], 12)):
        with file.open(newline="") as stream:
            lines = list(csv.reader(stream))[: rows + 1]
        with (folder / file.name).open("w", newline="") as stream:
            csv.writer(stream).writerows(lines)
        flags += [flag, folder / file.name]
    nlp = runs.load_recipe("nlp")
    *_, tokenizer = nlp.load_data(options.parse(nlp.Config, [*map(str, flags), *runs.TINY]))
    return flags, tokenizer, lines[1:]


def write(folder, auto, family, tokenizer):
    """Write a model of random weights and the tokenizer to a folder."""
    # Qwen2's class adds a token of its own to any tokenizer; published vocabularies have room as well.
    families.tiny(auto, family, len(tokenizer) + 8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(recipe, corpus, folder, family, auto, capfd):
    """(config, evaluation, printed output, exported model, its tokenizer); None if there is no such model."""
    module = runs.load_recipe(recipe)
    flags, tokenizer, _ = corpus
    if AutoConfig.for_model(FAMILIES[family][0]).__class__ not in auto._model_mapping:
        return None
    model = write(folder / "model", auto, family, tokenizer)
    given = [*flags, *FLAGS, "--model_name_or_path", model, "--output_dir", folder / "run"]
    config = options.parse(module.Config, [*map(str, given)])
    results = module.main(config)
    printed = capfd.readouterr()
    exported, loading = auto.from_pretrained(folder / "run/model", output_loading_info=True)
    assert not [names for kind, names in loading.items() if names and kind != "error_msgs"], loading
    return (
        config,
        results,
        printed.out + printed.err,
        exported.eval(),
        AutoTokenizer.from_pretrained(folder / "run/model"),
    )


def classifies(corpus, folder, family, capfd):
    """What the table says of nlp.py. The exported model must give the evaluation's loss and accuracy, text by text."""
    _, results, output, model, tokenizer = trained(
        "nlp", corpus, folder, family, AutoModelForSequenceClassification, capfd
    )
    padding = {"padding": "max_length"} if "padding changes the output" in output else {}
    logits = []
    with torch.inference_mode():
        for text, _ in corpus[2]:
            given = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt", **padding)
            logits.append(model(**given).logits[0])
    logits = torch.stack(logits)
    targets = torch.tensor([model.config.label2id[label] for _, label in corpus[2]])
    assert results["eval_loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)
    assert results["eval_accuracy"] == pytest.approx((logits.argmax(1) == targets).float().mean().item())
    assert logits.std(0).max() > 0.003, "the logits differ between texts"
    return "yes" + ", padded to `--max_length`" * bool(padding), output


def fills_in(corpus, folder, family, capfd):
    """What the table says of mlm.py. The exported model must give the evaluation's loss, document by document."""
    found = trained("mlm", corpus, folder, family, AutoModelForMaskedLM, capfd)
    if found is None:
        return "no such model in transformers", ""
    config, results, output, model, tokenizer = found
    packed, padded = "packed without padding" in output, "padding changes the output" in output
    assert packed != ("cannot be packed exactly" in output)
    _, held_out, _ = runs.load_recipe("mlm").load_data(config)
    losses = []
    with torch.inference_mode():
        for piece in range(len(held_out)):
            tokens, _, masked, labels = held_out.read_micro_batch(np.array([piece]), np.zeros(1, np.int64))
            ids = {"input_ids": tokens.tolist()}
            given = tokenizer.pad(ids, padding="max_length", max_length=LONGEST) if padded else ids
            logits = model(**{name: torch.tensor(values)[None] for name, values in given.items()}).logits[0, masked]
            losses.append(F.cross_entropy(logits, torch.from_numpy(labels), reduction="none"))
    assert results["eval_loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    return ("packed" if packed else "one document per row") + ", padded to `--max_length`" * padded, output


def frozen(output):
    """The names of the frozen layers, without their paths."""
    lines = [line.partition(": ")[2] for line in output.splitlines() if line.startswith("frozen, because")]
    names = [name.split(" ")[0].split(".") for line in lines for name in line.split(", ")]
    return sorted({name[-3] if name[-2] == "dense" else name[-2] for name in names})


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


def test_the_table_has_no_other_families():
    assert [row.split(" | ")[0].removeprefix("| ") for row in table()] == list(FAMILIES)


def table():
    """The rows of the page's table of families."""
    page = (runs.ROOT / "docs/models.md").read_text()
    _, _, rows = page.partition("| family | `model_type` | nlp.py | mlm.py | messages |\n|---|---|---|---|---|\n")
    return rows.partition("\n\n")[0].splitlines()


def test_the_page_names_the_tested_version():
    assert f"transformers {transformers.__version__}" in (runs.ROOT / "docs/models.md").read_text()
