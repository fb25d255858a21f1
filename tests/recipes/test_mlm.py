"""The recipe for masked language models: exact on any number of processes, resumable, and its export is a model.

The launches share one set of configs; their numbers are those that docs/exactness.md promises.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from shared.config import options
from shared.encoders.new_encoders import new_encoder
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")

WORLDS = (1, 2, 3)
TWENTY_STEPS = ["--max_train_steps", 20, "--eval_steps", 20, "--logging_steps", 1, "--checkpointing_steps", "no"]
SGD_RATE = 100.0  # so large that the weights after a step give the gradient to nearly all its digits
ONE_STEP = [
    *("--optim", "sgd", "--learning_rate", SGD_RATE, "--weight_decay", 0, "--max_grad_norm", 0, "--warmup_steps", 0),
    *("--lr_scheduler_type", "constant", "--max_train_steps", 1, "--checkpointing_steps", "no"),
]


@pytest.fixture(scope="module")
def mlm():
    return runs.load_recipe("mlm")


@pytest.fixture(scope="module")
def configs(texts):
    tiny = [*texts, *runs.TINY]
    return {
        "gradient": [*tiny, *ONE_STEP],
        "adam": [*tiny, *TWENTY_STEPS],
        "rows": [*tiny, *TWENTY_STEPS, "--no_packing"],
    }


@pytest.fixture(scope="module")
def outputs(configs, tmp_path_factory):
    """{processes: {name: output folder}}, from one launch for each number of processes."""
    folder = tmp_path_factory.mktemp("launches")
    once = {name: flags for name, flags in configs.items() if name != "rows"}
    return {w: runs.run_many(w, configs if w == 1 else once, folder, recipe="recipes/mlm.py") for w in WORLDS}


def prepared(mlm, flags):
    config = options.parse(mlm.Config, list(map(str, flags)))
    train, validation, tokenizer = mlm.load_data(config)
    return config, train, validation, tokenizer


def dense_losses(model, data, sample, epoch):
    """Loss and hits [hidden] of one piece by itself through the dense head, and how many are hidden."""
    tokens, _, masked, labels = data.read_micro_batch(np.array([sample]), np.array([epoch]))
    logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0][torch.from_numpy(masked)]
    targets = torch.from_numpy(labels)
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(1) == targets


def test_the_gradient_of_a_step_is_that_of_each_piece_alone_through_the_dense_head(mlm, configs, outputs):
    config, train, _, tokenizer = prepared(mlm, configs["gradient"])
    model = mlm.build_model(config, tokenizer)
    before = vector(model.state_dict())
    assert not config.whole_word_masking
    plan = Plan.of_run(
        config, SimpleNamespace(num_processes=1, process_index=0, is_fsdp2=False), lengths=train.lengths, packed=True
    )
    samples, epochs = plan.global_batch(0)
    pairs = zip(samples.tolist(), epochs.tolist(), strict=True)
    losses = torch.cat([dense_losses(model, train, *pair)[0] for pair in pairs])
    assert len(losses) == train.masked[samples].sum()
    losses.mean().backward()
    expected = vector({name: p.grad for name, p in model.named_parameters()})
    for world in WORLDS:
        moved = runs.weights(outputs[world]["gradient"]) - before
        assert runs.distance(moved / (-1.9 * SGD_RATE), expected) < 1e-6, f"{world} processes"


def vector(tensors):
    """All tensors by name as one vector, without the decoder's weight, which is that of the embedding."""
    return torch.cat([t.flatten().double() for name, t in sorted(tensors.items()) if name != "decoder.weight"])


def test_weights_after_twenty_steps_are_those_of_one_process_packed_or_not(outputs):
    one = runs.weights(outputs[1]["adam"])
    for output in (outputs[2]["adam"], outputs[3]["adam"], outputs[1]["rows"]):
        assert runs.distance(runs.weights(output), one) < 1e-5


def test_metrics_tell_the_same_story_on_any_number_of_processes(outputs):
    one = runs.metrics(outputs[1]["adam"])
    losses = [line["loss"] for line in one if "loss" in line]
    assert len(losses) == 20
    assert losses[0] > 1.05 * losses[-1]
    for world in (2, 3):
        other = runs.metrics(outputs[world]["adam"])
        for key, tolerance in {"step": 0, "samples": 0, "learning_rate": 0, "loss": 1e-4, "eval_loss": 1e-4}.items():
            values = [[line[key] for line in lines if key in line] for lines in (other, one)]
            assert values[0] == (pytest.approx(values[1], rel=tolerance) if tolerance else values[1]), key


def test_the_evaluation_is_that_of_each_piece_alone(mlm, configs, outputs):
    config, _, validation, tokenizer = prepared(mlm, configs["adam"])
    model = mlm.build_model(config, tokenizer)
    weights = load_file(outputs[1]["adam"] / "model/model.safetensors")
    assert set(model.state_dict()) - set(weights) == {"decoder.weight"}
    model.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        each = [dense_losses(model.eval(), validation, i, 0) for i in range(len(validation))]
    losses, hits = (torch.cat(part).double() for part in zip(*each, strict=True))
    for world in WORLDS:
        found = next(line for line in runs.metrics(outputs[world]["adam"]) if "eval_loss" in line)
        assert found["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert found["eval_accuracy"] == pytest.approx(hits.mean().item(), abs=1.5 / len(hits))
        assert found["eval_perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)


def test_held_out_text_is_hidden_the_same_way_whatever_the_training_masks(mlm, configs):
    usual, *other = (
        prepared(mlm, [*configs["adam"], *flags])[2]
        for flags in ([], ["--mlm_probability", "0.5"], ["--seed", "5"], ["--mask_replace_prob", "0.2"])
    )
    everything, epochs = np.arange(len(usual)), np.zeros(len(usual), int)
    for data in other:
        both = zip(usual.read_micro_batch(everything, epochs), data.read_micro_batch(everything, epochs), strict=True)
        assert all(np.array_equal(a, b) for a, b in both)
    tokens, _, masked, labels = usual.read_micro_batch(everything, epochs)
    assert set(tokens[masked]) == {usual.masking.mask_token}
    assert len(masked) / usual.sizes.sum() == pytest.approx(0.15, abs=0.02)
    assert usual.masking.mask_token not in labels


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_resumed_run_ends_with_the_same_bytes(mlm, texts, tmp_path, kind):
    """Whole words and random tokens included: all of it is drawn from what the step says."""
    dropout = ["--model_type", kind, "--whole_word_masking", "--max_train_steps", 8, "--checkpointing_steps", 4]
    flags = list(map(str, [*texts, *runs.TINY, *dropout]))
    mlm.main(options.parse(mlm.Config, [*flags, "--output_dir", str(tmp_path / "whole")]))
    middle = tmp_path / "whole/checkpoints/step_00000004"
    again = [*flags, "--output_dir", str(tmp_path / "again"), "--resume_from_checkpoint", str(middle)]
    mlm.main(options.parse(mlm.Config, again))
    whole, resumed = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "again"))
    assert whole == resumed
    last = [runs.training_lines(tmp_path / name)[-1] for name in ("whole", "again")]
    assert last[0]["samples"] == last[1]["samples"]
    assert last[0]["loss"] == last[1]["loss"]


def test_the_export_fills_masks_and_is_fine_tuned_by_the_other_recipe(mlm, configs, outputs, texts, tmp_path):
    from transformers import pipeline

    folder = outputs[1]["adam"] / "model"
    fill = pipeline("fill-mask", model=str(folder))
    found = fill(f"Return the {fill.tokenizer.mask_token} of the element.")
    assert len(found) == 5
    assert 0 < found[0]["score"] < 1
    assert json.loads((folder / "config.json").read_text())["vocab_size"] % 64 == 0

    nlp = runs.load_recipe("nlp")
    few = ["--max_train_steps", "2", "--model_name_or_path", str(folder), "--output_dir", str(tmp_path / "fine")]
    config = options.parse(nlp.Config, [*map(str, [*texts, *runs.TINY]), *few])
    *_, labels, tokenizer = nlp.load_data(config)
    model = nlp.build_model(config, labels, tokenizer)
    pretrained = load_file(folder / "model.safetensors")
    own = model.state_dict()
    taken = [name for name in pretrained if name in own and torch.equal(own[name], pretrained[name])]
    assert set(own) - set(taken) == {"classifier.weight", "classifier.bias"}, "only the classifier is new"
    assert nlp.main(config)["eval_loss"] > 0


def test_a_run_goes_on_from_a_model_that_was_exported(mlm, outputs, texts, tmp_path):
    folder = outputs[1]["adam"] / "model"
    flags = [*texts, *runs.TINY, "--model_name_or_path", folder, "--max_train_steps", 1, "--warmup_steps", 0]
    mlm.main(options.parse(mlm.Config, [*map(str, flags), "--output_dir", str(tmp_path / "on")]))
    before = runs.metrics(outputs[1]["adam"])
    (first,) = runs.training_lines(tmp_path / "on")
    assert first["loss"] < next(line["loss"] for line in before if "loss" in line) - 0.3


@pytest.mark.parametrize("name", ["modernbert_base", "bert_base"])
def test_the_full_size_configs_load_and_step_with_tiny_dimensions(mlm, texts, tmp_path, name):
    file = str(runs.ROOT / f"recipes/configs/{name}.yaml")
    full = options.parse(mlm.Config, ["--config", file])
    assert full.hidden_size == 768
    assert full.vocab_size % 64 == 0
    decay_per_step = full.weight_decay * full.learning_rate  # as torch's AdamW has it
    assert decay_per_step == pytest.approx(1e-5), "as in the sources, whose optimizers leave the rate out"
    tiny = [*texts, *runs.TINY, "--intermediate_size", 48, "--max_train_steps", 2, "--mixed_precision", "no"]
    config = options.parse(mlm.Config, ["--config", file, *map(str, tiny), "--output_dir", str(tmp_path / "run")])
    assert config.model_type == full.model_type
    mlm.main(config)
    assert [line["step"] for line in runs.training_lines(tmp_path / "run")] == [2]


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_a_new_model_has_the_positions_and_the_rotary_base_that_were_asked_for(kind):
    tokenizer = SimpleNamespace(pad_token_id=3, cls_token_id=1, sep_token_id=2)
    given = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
    given |= {"intermediate_size": None, "max_length": 512, "rope_theta": None}
    with_length = type("Tokenizer", (SimpleNamespace,), {"__len__": lambda _: 100})(**vars(tokenizer))

    def sizes_of(config):
        return new_encoder("AutoModelForMaskedLM", config, with_length, vocab_multiple=64).config

    sizes = sizes_of(SimpleNamespace(**given))
    assert sizes.vocab_size == 128
    assert sizes.max_position_embeddings == (516 if kind == "roberta" else 512)
    wanted = SimpleNamespace(**given | {"rope_theta": 1e4})
    if kind != "modernbert":
        with pytest.raises(UserError, match="--rope_theta 10000 has no effect on --model_type"):
            sizes_of(wanted)
        return
    for chosen, theta in ((sizes, 160_000), (sizes_of(wanted), 10_000)):
        found = {name: part["rope_theta"] for name, part in chosen.rope_parameters.items()}
        assert found == {"full_attention": theta, "sliding_attention": 10_000}


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(mlm, texts, tmp_path, kind):
    flags = [*texts, *runs.TINY, "--model_type", kind, "--optim", "muon", "--weight_decay", 0.1, "--max_train_steps", 2]
    flags += ["--adam_beta2", 0.98]
    config, _, _, tokenizer = prepared(mlm, [*flags, "--output_dir", tmp_path / "run"])
    model = mlm.build_model(config, tokenizer)
    optimizer = make_optimizer(model, config)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [({names[id(p)] for p in group["params"]}, group) for group in optimizer.param_groups]
    assert sum(len(found) for found, _ in groups) == len(names)
    for found, group in groups:
        for name in found:
            matrix = model.get_parameter(name).ndim >= 2
            assert group["use_muon"] == (matrix and ".layer" in name), name
            assert group["use_muon"] or (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-10)
            assert (group["weight_decay"] > 0) == matrix, name
    if kind == "modernbert":
        mlm.main(config)
        assert all(np.isfinite(line["loss"]) for line in runs.training_lines(tmp_path / "run"))
        before, after = vector(model.state_dict()), runs.weights(tmp_path / "run")
        assert 0 < runs.distance(after, before) < 1


REFUSED = [
    (["--metric_name", "accuracy"], "--metric_name accuracy"),
    (["--mlm_probability", "0"], "--mlm_probability 0.0"),
    (["--mlm_probability", "1"], "--mlm_probability 1.0"),
    (["--mask_replace_prob", "0.95"], "--mask_replace_prob 0.95 and --random_replace_prob 0.1"),
    (["--max_length", "2"], "--max_length 2 leaves no room"),
    (["--max_tokens_per_micro_batch", "8"], "--max_tokens_per_micro_batch 8 is smaller"),
    (["--hidden_size", "30"], "--hidden_size 30"),
    (["--model_type", "bert", "--num_attention_heads", "3"], "--num_attention_heads 3"),
    (["--text_column_name", "words"], r"--text_column_name words: .* \(columns: text, label\)"),
    (["--decay_ratio", "0.3", "--lr_scheduler_type", "linear"], "--decay_ratio 0.3 has no effect"),
    (["--metric_for_best_model", "f1"], "--metric_for_best_model f1"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_what_a_user_can_get_wrong_is_refused_in_one_line(mlm, texts, tmp_path, flags, said):
    everything = [*map(str, [*texts, *runs.TINY]), *flags, "--output_dir", str(tmp_path / "out")]

    def start():
        mlm.main(options.parse(mlm.Config, everything))

    with pytest.raises(UserError, match=said) as caught:
        start()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/config.yaml").exists()


def test_the_best_model_by_perplexity_is_the_one_with_the_lowest(mlm):
    from shared.monitoring import evaluation

    config = options.parse(mlm.Config, ["--metric_for_best_model", "perplexity"])
    best_by = evaluation.best_by(config, evaluation.computed_by_recipe(config, ("accuracy", "perplexity")))
    assert (best_by.name, best_by.greater_is_better) == ("eval_perplexity", False)


@pytest.mark.campaign
def test_a_pretrained_model_beats_one_from_scratch(tmp_path):
    """The means of three seeds after 50, 100 and 200 steps of fine-tuning; docs/pretraining.md shows each."""
    command = [sys.executable, "benchmarks/pretraining.py", "--output_dir", tmp_path]
    runs.succeed(command, timeout=7200, CUDA_VISIBLE_DEVICES="")
    rows = json.loads((tmp_path / "pretraining.json").read_text())["rows"]
    for steps in (50, 100, 200):
        scores = {
            way: [row["eval_accuracy"] for row in rows if (row["way"], row["steps"]) == (way, steps)]
            for way in ("from scratch", "pretrained")
        }
        assert [len(each) for each in scores.values()] == [3, 3]
        assert np.mean(scores["pretrained"]) > np.mean(scores["from scratch"]), (steps, scores)
