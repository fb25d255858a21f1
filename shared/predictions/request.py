"""Predict a file with a trained model: python -m shared.predict OUTPUT_DIR [FILE] [FLAGS]

The flags are those below and those of the recipe. Important ones are --text_column_names, --label_column_name,
--image_column_name, --max_length, --max_tokens_per_micro_batch, --skip_incomplete_rows and --mixed_precision.
"""

import argparse
import dataclasses
import glob
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shared.config import command_line, options
from shared.config.fields import Meaning, fields_with
from shared.contrastive.models import MODULES_FILE, stored_settings, with_names
from shared.datasets.readers import kind_of
from shared.disk import is_url
from shared.errors import UserError, about
from shared.monitoring.log import read_metrics
from shared.options.data_options import DataOptions
from shared.options.text_options import TOKENS
from shared.plan.batches import Budget, MicroBatch, evaluation_batches
from shared.run import recipes
from shared.run.export import WEIGHTS
from shared.run.resume import data_of

RECIPES = {  # of a folder that save_pretrained wrote, by the end of the name of the model's class
    "ForSequenceClassification": "nlp",
    "ForTokenClassification": "token_classification",
    "ForImageClassification": "image_classification",
    "ForMaskedLM": "mlm",
}
FORMATS = (".csv", ".jsonl", ".parquet")
# What a recipe reads, by the first of these settings that it has, and the possible formats of its predictions.
KINDS = {
    "image_column_name": ("images", FORMATS),
    "prompts": ("embeddings", (".parquet", ".jsonl")),
    "text_column_names": ("texts", FORMATS),
    "text_column_name": ("tags", (".jsonl", ".parquet")),
    "output_dir": ("table", FORMATS),
}
# Settings of a run that predictions keep, besides those that the recipe itself declares.
OF_RUN = (
    *("image_column_name", "label_column_name", "deterministic", "metric_name", "positive_label"),
    *("trust_remote_code", "csv_delimiter", "max_length"),
)
OF_DATA = (*DataOptions.__annotations__, "train_dir", "validation_dir", "skip_corrupt_images", "seed")
NOT_KEPT = {"sync_batchnorm", TOKENS}  # batch norm uses its running averages
Pad = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # from lengths to those with padding
SAMPLES = "per_device_eval_batch_size"
USUAL_TOKENS, USUAL_SAMPLES = 4096, 64  # in a forward pass of a model without a run
NO_LIMIT = 1_000_000  # tokens in a text
UNSHARDED = options.Rule(
    lambda it: it.sharded,
    "distributed_type FSDP: predictions need the whole model on each device: use accelerate_configs/multi_gpu.yaml",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The flags of commands that compute a trained model."""

    recipe: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """Recipe of the model. None: the one that made the run, or the one of this project for such a model."""
    scores: bool = True
    """Compute scores if there are labels."""
    per_device_eval_batch_size: int | None = None
    """Maximum number of samples in a forward pass. None: twice that of the run's micro-batches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """The flags of predictions."""

    predictions_file: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """File to write: .csv, .jsonl or .parquet. None: OUTPUT_DIR/predictions/NAME, in the format of FILE."""
    runtime: Literal["onnx"] | None = None
    """onnx: compute the file of `python -m shared.export` by onnxruntime, on the CPU. None: compute by PyTorch."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is predicted, and how."""

    recipe: ModuleType
    """Has `Config`, `build_model` and `predict_batch`."""
    kind: str
    """What the recipe reads, which decides how it is predicted."""
    config: Any
    """The settings of the recipe, with the flags of the command: those of the run, changed by the command line."""
    model: Path
    """The folder of the model."""
    run: Path | None
    """The output folder of the run; None for a model without its run."""
    file: str | None
    """The file or folder to predict. None: the validation data of the run."""
    given: frozenset[str]
    """The names of the given flags."""

    @property
    def is_own_model(self) -> bool:
        """Whether only `build_model` of the recipe can build the model, which has no config of transformers."""
        return not (self.model / "config.json").is_file()

    @property
    def output(self) -> Path:
        """The file that is written."""
        return Path(self.config.predictions_file)

    @property
    def record(self) -> Path:
        """The JSON file that describes the predictions: model, input, settings and scores."""
        return Path(f"{self.output}.json")

    @property
    def parts_folder(self) -> Path:
        """The folder of the parts that are computed so far, beside the file of predictions."""
        return Path(self.config.output_dir)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Maximum number of tokens, padding included, and of samples in a forward pass."""
        return getattr(self.config, TOKENS, None), self.config.per_device_eval_batch_size

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of a function of the recipe.

        Raises:
            UserError: the recipe has no such function, or the function takes other arguments.
        """
        needed = f"no function {name} as predictions of this kind ({self.kind}) need it (docs/predictions.md)"
        with about(f"{self.recipe.__file__} has {needed}"):
            inspect.signature(getattr(self.recipe, name)).bind(*arguments)
        return getattr(self.recipe, name)(*arguments)

    def batches(self, lengths: Any, padded: Pad = np.asarray, packed: bool = False) -> list[MicroBatch]:
        """The forward passes for samples of these lengths, [n] tokens before `padded`: see `evaluation_batches`."""
        return evaluation_batches(padded(np.asarray(lengths, np.int64)), Budget(*self.limits, packed))

    @property
    def digests_of_run(self) -> list[str]:
        """The digests of the training and the validation data of the run; [] if it has not recorded them."""
        file = self.run / "metrics.jsonl" if self.run else None
        return (data_of(read_metrics(file)) or []) if file and file.is_file() else []

    def as_onnx(self, *fixed: str) -> "Request":
        """This request as an ONNX file, which has decided the settings `fixed`, computes it: in float32, not packed.

        Raises:
            UserError: a flag is given that would have no effect.
        """
        if ignored := self.given & {"packing", "mixed_precision", "activation_dtype", "torch_compile", *fixed}:
            raise UserError(f"--{min(ignored)} has no effect on a model in the ONNX format: leave it out")
        settings = {"mixed_precision": "no"} | ({"packing": False} if hasattr(self.config, "packing") else {})
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **settings))


def parse_request(argv: Sequence[str], flags_class: type[ModelFlags] = Flags) -> Request:
    """What a command line asks for: OUTPUT_DIR [FILE] [FLAGS]; `flags_class` has the flags that no recipe has.

    Raises:
        UserError: an argument is missing, unknown or wrong, or the folder has no model that can predict.
    """
    places = next((place for place, word in enumerate(argv) if word.startswith("-")), len(argv))
    if {"-h", "--help"} & {*argv}:
        next(command_line.layers(flags_class, ["--help"]))
    if places not in (1, 2):
        raise UserError("expected a folder and at most one file, then the flags: OUTPUT_DIR [FILE] [FLAGS]")
    folder, file, flags = Path(argv[0]), argv[1] if places == 2 else None, argv[places:]
    model = model_folder(folder)
    recipe = recipe_of_request(folder, model, flags)
    # No setting needs another one here, because most settings of the run are left out.
    names = {"NEEDS": (), "EXCLUDES": (), "RULES": (UNSHARDED, *recipe.Config.RULES), "__module__": recipe.__name__}
    bases = flags_class, recipe.Config
    config_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(type("Config", bases, names))
    given = {name: value for layer in command_line.layers(config_class, flags) for name, value in layer.items()}
    stored = options.load(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    is_own = not (model / "config.json").is_file()
    if not stored and (file is None or is_own):
        raise UserError(f"{folder} is not the folder of a run, which has settings and validation data: give a FILE")
    known = {field.name for field in dataclasses.fields(config_class)}
    kind, possible = next(KINDS[name] for name in KINDS if name in known)
    values = kept_settings(recipe.Config, stored, file is None or is_own or kind == "table", is_own)
    if kind != "table" and "label_column_name" not in known:
        raise UserError(f"{recipe.__file__} reads {kind}, and its Config has no label_column_name: add this setting")
    values |= settings_of_model(kind, model, {**values, **given}) | given
    values["output_dir"] = str(model)
    if "predictions_file" in known:
        if is_url(asked := given.get("predictions_file") or ""):
            raise UserError(f"--predictions_file {asked} is a URL: name a file of this machine")
        output = Path(asked or default_output(folder, file, possible))
        if output.suffix not in possible:
            raise UserError(
                f"--predictions_file {output}: the name must end in {', '.join(possible)}, the possible formats of "
                f"{recipe.__file__}"
            )
        values |= {"predictions_file": str(output), "output_dir": f"{output}.parts"}
    if not is_own:
        values["model_name_or_path"] = str(model)
    config = config_class(**{name: value for name, value in values.items() if name in known})
    options.check(config)
    return Request(recipe, kind, config, model, folder if stored else None, file, frozenset(given))


def model_folder(folder: Path) -> Path:
    """The folder of the model: model/ in the folder of a run, or `folder` itself.

    Raises:
        UserError: there is no model.
    """
    model = folder / "model" if (folder / "model").is_dir() or (folder / "config.yaml").is_file() else folder
    if not ((model / "config.json").is_file() or (model / WEIGHTS).is_file()):
        raise UserError(f"{model} has no config.json and no {WEIGHTS}: give the folder of a finished run or of a model")
    return model


def recipe_of_request(folder: Path, model: Path, flags: Sequence[str]) -> ModuleType:
    """The recipe of --recipe, or the one that made the run in `folder` or above `model`, or the one for such a model.

    Raises:
        UserError: it is unknown, does not exist, or does not predict.
    """
    stored = [run / "config.yaml" for run in (folder, model.parent)]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", type=Path, nargs="?")  # without a value, the parser of all flags refuses it
    path = parser.parse_known_args(flags)[0].recipe
    path = path or next((recipes.recipe_of(file) for file in stored if file.is_file()), None)
    if not path:
        places = [options.PROJECT / folder / f"{recipe_for(model)}.py" for folder in ("recipes", ".")]  # "." in a copy
        path = next((place for place in places if place.is_file()), places[0])
    if not path.is_file():
        raise UserError(f"{path}, the recipe of {folder}, does not exist: name its place with --recipe")
    recipe = recipes.load_recipe(path)
    if lacking := [name for name in ("build_model", "predict_batch") if not hasattr(recipe, name)]:
        raise UserError(f"{model} has nothing to predict for a file: {path} has no function {lacking[0]}")
    return recipe


def recipe_for(model: Path) -> str:
    """The name of the recipe for a folder that `save_pretrained` wrote, by the class of its model.

    Raises:
        UserError: no recipe trains such a model.
    """
    with about(str(model / "config.json")):
        name = str((json.loads((model / "config.json").read_text()).get("architectures") or ["no class"])[0])
    ends = RECIPES | ({"": "embeddings"} if (model / MODULES_FILE).is_file() else {})
    for end, recipe in ends.items():
        if name.endswith(end):
            return recipe
    raise UserError(f"{model} is a {name}, which no recipe of this project trains: name its recipe with --recipe")


def kept_settings(config_class: type, stored: Mapping[str, Any], reads_data: bool, builds: bool) -> dict[str, Any]:
    """Those settings of a run that its predictions keep: those that the recipe declares, and those in `OF_RUN`.

    Predictions may also read the data of the run, or build its model anew.
    """
    kept = {*OF_RUN, *(OF_DATA if reads_data else ())}
    if builds:
        kept |= {"model_name_or_path", "revision"} | fields_with(config_class, Meaning.SIZE_OF_NEW_MODEL)
    for each in config_class.__mro__:
        if not each.__module__.startswith("shared."):
            kept |= {*getattr(each, "__annotations__", ())}
    found = {name: stored[name] for name in kept - NOT_KEPT if name in stored}
    for name, limit in ((TOKENS, TOKENS), (SAMPLES, "per_device_train_batch_size")):
        if stored.get(limit):
            found[name] = 2 * stored[limit]  # as in the evaluation of the run
    return found


def settings_of_model(kind: str, model: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not `known` from the run or a flag, by the files of the model; always its pooling.

    Raises:
        UserError: nothing limits the length of a text, or it is open which of the model's prompts the texts get; or
            see `stored_settings`.
    """
    if kind in ("images", "table"):
        return {SAMPLES: known.get(SAMPLES, USUAL_SAMPLES)}
    found: dict[str, Any] = {TOKENS: known.get(TOKENS, USUAL_TOKENS)}
    longest, limits = None, [NO_LIMIT]  # a tokenizer without a limit has a larger one
    if kind == "embeddings" and (model / MODULES_FILE).is_file():
        found["static"], found["pooling"], longest, prompts = stored_settings(model)
        if prompts and "prompts" not in known:
            raise UserError(f"--prompts is needed, one for each text column or '': {model} has {with_names(prompts)}")
    for file, name in (("tokenizer_config.json", "model_max_length"), ("config.json", "max_position_embeddings")):
        if (model / file).is_file():
            limits.append(int(json.loads((model / file).read_text()).get(name) or NO_LIMIT))
    found["max_length"] = known.get("max_length") or longest or min(limits)
    if found["max_length"] == NO_LIMIT:
        raise UserError(f"--max_length is needed: neither {model} nor its tokenizer limits the length of a text")
    return found


def default_output(folder: Path, file: str | None, possible: tuple[str, ...]) -> Path:
    """OUTPUT_DIR/predictions/NAME in the format of FILE: CSV, JSON lines or Parquet.

    Parquet for the validation data of a run, and otherwise the first `possible` format if that of FILE is not possible.

    Raises:
        UserError: FILE is a pattern, which gives no name.
    """
    if file and glob.has_magic(file) and not Path(file).exists():
        raise UserError(f"FILE {file} names several files: name the output with --predictions_file")
    name = Path(file or "validation.parquet").resolve().name
    kind = kind_of(Path(name))
    stem = name[: name.lower().rindex(kind)] if kind else name
    format_ = {".json": ".jsonl", ".tsv": ".csv"}.get(kind, kind)
    return folder / "predictions" / (stem + (format_ if format_ in possible else possible[0]))
