"""Recipes with FSDP2 on CPUs over gloo equal runs of one process, for each kind of model that they make or load."""

import families
import pytest
import runs
import toy_data
import transformers
from safetensors.torch import load_file

pytestmark = pytest.mark.clusters
ALONE = {"ACCELERATE_USE_CPU": "true"}
STEPS = [
    *("--max_train_steps", 20, "--eval_steps", 20, "--logging_steps", 1, "--checkpointing_steps", 20),
    *("--learning_rate", 1e-3, "--max_tokens_per_micro_batch", 192),
]
HEADS = {"nlp": "ForSequenceClassification", "mlm": "ForMaskedLM", "image_classification": "ForImageClassification"}
HEADS |= {"token_classification": "ForTokenClassification", "embeddings": ""}


def write_models(folder, recipe, kinds, processor, **more):
    """Write the models of a recipe with random weights; {kind: the flags that load the model}."""
    for kind in kinds:
        model = families.small(kind, getattr(transformers, f"AutoModel{HEADS[recipe]}"), initializer_range=0.02, **more)
        for each in (model, processor):
            each.save_pretrained(folder / kind)
    return {kind: ["--model_name_or_path", folder / kind] for kind in kinds}


def text_configs(recipe, folder, texts):
    """The flags of the runs of a text recipe, by kind of model."""
    data = toy_data.write_data(recipe, texts, folder)
    *_, tokenizer = runs.prepared(recipe, [*data, *runs.TINY])
    made = {name: ["--model_type", name] for name in ("modernbert", "bert", "roberta")}
    made |= {"rows": ["--model_type", "bert", "--no_packing"]} if recipe == "nlp" else {}
    known = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    loaded = write_models(folder, recipe, ("distilbert", "electra"), tokenizer, **known)
    loaded["adapters"] = [*loaded["electra"], "--lora_rank", 4]
    return {name: [*data, *runs.TINY, *STEPS, *flags] for name, flags in (made | loaded).items()}


def image_configs(recipe, folder, _):
    """The flags of the image recipe's runs, by kind of model; two and three processes share six micro-batches."""
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    loaded = write_models(folder, recipe, ("vit", "deit"), processor, num_labels=10)
    own = ["--global_batch_size", 36, "--micro_batches_per_step", 6, "--optim", "adamw"]
    made = {"resnet": ["--scale_learning_rate", "none"]}
    return {name: [*runs.TINY_IMAGES, *STEPS[:-2], *own, *flags] for name, flags in (made | loaded).items()}


# Some kinds of model per recipe are resumed, too. The kinds in neither list are trained only.
RESUMED = {"nlp": ["modernbert", "adapters"], "mlm": ["bert", "electra"], "image_classification": ["resnet", "vit"]}
RESUMED |= {"token_classification": ["modernbert", "electra"], "embeddings": ["bert", "distilbert"]}
TRAINED = {"nlp": ["rows"]}
KINDS = [(recipe, part) for part in ("resumed", "others") for recipe in HEADS]


@pytest.fixture(scope="module", params=KINDS, ids=", ".join)
def trained(request, texts, tmp_path_factory):
    """(recipe, {how: {kind of model: output folder}}, folder of the printed output).

    "alone" is a whole run on one process without FSDP, and "two" on two processes with it. "three" and "unsharded"
    resume "two" from the middle: "three" on three processes with FSDP, "unsharded" on one process without it.
    """
    recipe, part = request.param
    folder, path = tmp_path_factory.mktemp("fsdp"), f"recipes/{recipe}.py"
    configs = image_configs if recipe == "image_classification" else text_configs
    every, in_test = configs(recipe, folder, texts), RESUMED[recipe] + TRAINED.get(recipe, [])
    chosen = {name: flags for name, flags in every.items() if (name in in_test) == (part == "resumed")}
    saved = {n: [*flags, "--checkpointing_steps", 10] if n in RESUMED[recipe] else flags for n, flags in chosen.items()}
    alone = runs.run_many(1, chosen, folder, path, **ALONE)
    two = runs.run_many(2, saved, folder, path, **runs.FSDP)
    if part == "others":
        return recipe, {"alone": alone, "two": two}, folder
    middle = {n: ["--resume_from_checkpoint", two[n] / "checkpoints/step_00000010"] for n in RESUMED[recipe]}
    resumed = {n: [*chosen[n], *flags] for n, flags in middle.items()}
    three = runs.run_many(3, resumed, folder, path, **runs.FSDP)
    again = runs.run_many(1, {f"{n}-resumed": flags for n, flags in resumed.items()}, folder, path, **ALONE)
    unsharded = {name.removesuffix("-resumed"): output for name, output in again.items()}
    return recipe, {"alone": alone, "two": two, "three": three, "unsharded": unsharded}, folder


def test_each_process_saves_its_part_of_the_sharded_model(trained):
    _, outputs, folder = trained
    for how, processes in (("two", 2), ("three", 3)):
        if how in outputs:
            printed = (folder / f"output-{processes}.txt").read_text()
            assert printed.count("FSDP2 over gloo") == len(outputs[how]) > 0
    for output in outputs["two"].values():
        files = {file.name for file in (output / "checkpoints/step_00000020/pytorch_model_fsdp_0").iterdir()}
        assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_weights_losses_and_scores_equal_those_of_one_process_without_fsdp(trained):
    _, outputs, _ = trained
    with_fsdp = [(how, name) for how in outputs if how != "alone" for name in outputs[how]]
    assert with_fsdp
    for how, name in with_fsdp:
        output, alone = outputs[how][name], outputs["alone"][name]
        assert runs.distance(*map(runs.weights_that_learn, (output, alone))) < 1e-5, (how, name)
        losses = [runs.losses(each)[-10:] for each in (output, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), (how, name)
        assert runs.evaluation(output) == pytest.approx(runs.evaluation(alone), rel=1e-5), (how, name)


def test_transformers_loads_the_exported_model(trained):
    recipe, outputs, _ = trained
    auto = getattr(transformers, f"AutoModel{HEADS[recipe]}")
    for name, output in outputs["two"].items():
        model, found = auto.from_pretrained(output / "model", output_loading_info=True)
        assert not any(names for kind, names in found.items() if kind != "error_msgs"), name
        assert not hasattr(model, "unshard"), name


def test_the_exported_adapters_equal_those_of_one_process_without_fsdp(trained):
    _, outputs, _ = trained
    if "adapters" not in outputs["alone"]:
        pytest.skip("no run of these has adapters")
    alone, *others = (load_file(each["adapters"] / "adapter/adapter_model.safetensors") for each in outputs.values())
    assert others
    for other in others:
        assert other.keys() == alone.keys()
        assert max(runs.distance(other[name], alone[name]) for name in alone) < 1e-4
