"""The settings of `python -m shared.predict`: those of the run that trained the model, changed by the flags."""

import dataclasses
import glob
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from shared.augmentation.augmentation import AugmentationOptions
from shared.config import options
from shared.config.limits import CanBeZero, Limits
from shared.contrastive.pooling import Pooling
from shared.contrastive.sentence_transformers_files import MODULES_FILE, POOLINGS, stored_settings
from shared.datasets.files import kind_of
from shared.errors import UserError
from shared.options.text_options import TextOptions
from shared.predictions.output import FORMATS, parts_folder

MODEL_OF_RUN = (
    *("text_column_name", "text_column_names", "image_column_name", "label_column_name", "label_delimiter"),
    *("problem_type", "max_length", "stride", "temperature", "matryoshka_dims"),
    *("packing", "channels_last", "deterministic", "metric_name", "positive_label"),
    *("trust_remote_code", "csv_delimiter"),
)
DATA_OF_RUN = (
    *("dataset_name", "dataset_config_name", "train_split_name", "validation_split_name", "train_file"),
    *("validation_file", "train_dir", "validation_dir", "validation_split_percentage", "seed"),
    *("skip_incomplete_rows", "skip_corrupt_images", "max_train_samples", "max_eval_samples"),
)
BUDGET = ("max_tokens_per_micro_batch", "per_device_eval_batch_size")
READ = ("scores", "csv_delimiter", "skip_incomplete_rows")
OF_FILES = ("image_column_name", "label_column_name", "csv_delimiter")  # a folder of images has no columns
NO_LIMIT = 1_000_000  # a tokenizer without a limit has a larger model_max_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionOptions(options.Options):
    """The settings that predictions of all kinds share. `output_dir` is the folder of the parts."""

    model_name_or_path: str | None = None
    """The folder of the model."""
    input_file: str | None = None
    """The file or folder to predict. None: the validation data of the run."""
    predictions_file: str = ""
    """The file that is written."""
    per_device_eval_batch_size: int | None = None
    """Maximum number of samples in a forward pass."""
    scores: bool = True
    """Compute scores if there are labels."""
    labels_required: bool = False
    """Whether it is an error if the label column is missing."""

    AFFECT_PREDICTIONS: ClassVar[tuple[str, ...]] = ()
    """The settings that can change the file of predictions, besides the model and the input."""
    FORMATS: ClassVar[tuple[str, ...]] = FORMATS
    """The possible formats of the file, the default first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings(PredictionOptions, TextOptions):
    """The settings for a text classifier."""

    text_column_names: tuple[str, ...] = ("text",)
    """Column of the texts, or the two columns of text pairs."""
    label_column_name: tuple[str, ...] = ("label",)
    """Column or columns of the labels."""
    label_delimiter: str | None = None
    """Separator between several labels in the label column."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """The --problem_type of the run."""
    packing: bool = False
    """Concatenate the texts of a micro-batch without padding."""
    max_tokens_per_micro_batch: int | None = 4096
    """Maximum number of tokens in a forward pass, padding included."""

    NEEDS: ClassVar = ()
    AFFECT_PREDICTIONS: ClassVar = (
        *(*READ, "text_column_names", "label_column_name", "label_delimiter", "max_length", "packing", *BUDGET),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TagSettings(PredictionOptions, TextOptions):
    """The settings for a model of token classification."""

    text_column_name: str = "tokens"
    """Column of the words of each text, or of texts."""
    label_column_name: str = "tags"
    """Column of the tags of the words, or of spans."""
    stride: CanBeZero = 32
    """Number of tokens that consecutive windows of a text share."""
    packing: bool = True
    """Concatenate windows without padding."""
    max_tokens_per_micro_batch: int | None = 4096
    """Maximum number of tokens in a forward pass, padding included."""

    NEEDS: ClassVar = ()
    AFFECT_PREDICTIONS: ClassVar = (
        *(*READ, "text_column_name", "label_column_name", "max_length", "stride", "packing", *BUDGET),
    )
    FORMATS: ClassVar = (".jsonl", ".parquet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(PredictionOptions, TextOptions):
    """The settings for a model of sentence embeddings."""

    text_column_names: tuple[str, ...] = ("anchor", "positive")
    """Columns of the texts."""
    all_columns_required: bool = False
    """Whether it is an error if one of the columns is missing."""
    packing: bool = True
    """Concatenate the texts of a micro-batch without padding."""
    pooling: Pooling = "mean"
    """How the embedding of a text is computed."""
    temperature: Annotated[float, Limits(above=0)] = 0.05
    """Divides the cosines of embeddings in the loss."""
    matryoshka_dims: tuple[int, ...] | None = None
    """Numbers of first dimensions that have scores of their own."""
    max_tokens_per_micro_batch: int | None = 4096
    """Maximum number of tokens in a forward pass, padding included."""

    NEEDS: ClassVar = ()
    AFFECT_PREDICTIONS: ClassVar = (
        *(*READ, "text_column_names", "max_length", "packing", "pooling", "temperature", "matryoshka_dims", *BUDGET),
    )
    FORMATS: ClassVar = (".parquet", ".jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSettings(PredictionOptions, AugmentationOptions):
    """The settings for an image classifier."""

    per_device_eval_batch_size: int | None = 64
    """Maximum number of images in a forward pass."""
    channels_last: bool = True
    """On a GPU, use the memory format channels-last."""
    sync_batchnorm: bool = False
    """Always off: in predictions, batch norm uses its running averages."""

    NEEDS: ClassVar = ()
    AFFECT_PREDICTIONS: ClassVar = (
        *(*READ, "image_column_name", "label_column_name", "skip_corrupt_images", BUDGET[1]),
    )


ClassifierSettings = TextSettings | ImageSettings
Settings = ClassifierSettings | TagSettings | EmbeddingSettings
WHAT: dict[type[Settings], str] = {
    TextSettings: "a text classifier",
    ImageSettings: "an image classifier",
    TagSettings: "a model of token classification",
    EmbeddingSettings: "a model of sentence embeddings",
}


def settings_of(folder: Path, file: str | None, flags: Mapping[str, Any]) -> Settings:
    """The settings for predicting `file` with the model in `folder`.

    Args:
        folder: the output folder of a run, or a folder that `save_pretrained` wrote.
        file: the file or folder to predict; None: the validation data of the run.
        flags: the flags of `python -m shared.predict` by name; None: not given.

    Raises:
        UserError: the folder has no model that can predict, or a flag does not fit the model.
    """
    model = model_folder(folder)
    kind = settings_class(model)
    stored = options.load(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    if file is None and not stored:
        raise UserError(f"{folder} is not the folder of a run, which has validation data: give a FILE to predict")
    given = {name: value for name, value in flags.items() if value is not None}
    known = {field.name for field in dataclasses.fields(kind)}
    if kind is TagSettings:
        known.remove("csv_delimiter")  # no CSV file has lists of words
    unfit, what = [name for name in given if name not in known], WHAT[kind]
    if not unfit and kind is ImageSettings and file is not None and Path(file).is_dir():
        unfit, what = [name for name in given if name in OF_FILES], f"the folder {file}"
    if unfit:
        raise UserError(f"--{unfit[0]} {options.shown(given[unfit[0]])} has no effect on {what}: leave it out")
    values = {name: stored[name] for name in MODEL_OF_RUN if name in stored} | budget_of_run(stored)
    if file is None:
        values |= {name: stored[name] for name in DATA_OF_RUN if name in stored}
    elif kind_of(Path(file)) not in (".csv", ".tsv"):
        values.pop("csv_delimiter", None)  # the run's files have it, and this file does not
    output = Path(given.get("predictions_file") or default_output(folder, file, kind.FORMATS))
    if output.suffix not in kind.FORMATS:
        raise UserError(
            f"--predictions_file {output}: the name must end in {', '.join(kind.FORMATS)}, the possible formats for "
            f"{WHAT[kind]}"
        )
    values |= given | {"model_name_or_path": str(model), "input_file": file, "predictions_file": str(output)}
    values |= {"output_dir": str(parts_folder(output)), "labels_required": "label_column_name" in given}
    if kind is EmbeddingSettings:
        values["all_columns_required"] = "text_column_names" in given
        values["pooling"], longest = stored_settings(model)
        if values["pooling"] not in POOLINGS:
            raise UserError(f"{model}: its pooling is {values['pooling'] or 'unknown'}, not {' or '.join(POOLINGS)}")
        if longest is not None:
            values.setdefault("max_length", longest)
    if kind is not ImageSettings and "max_length" not in values:
        values["max_length"] = longest_text(model)
    if kind is not TextSettings and isinstance(labels := values.get("label_column_name"), tuple):
        if len(labels) > 1:
            raise UserError(f"--label_column_name {' '.join(labels)}: {WHAT[kind]} needs one column of labels")
        values["label_column_name"] = labels[0]
    settings = kind(**{name: value for name, value in values.items() if name in known})
    options.check(settings)
    return settings


def model_folder(folder: Path) -> Path:
    """The folder of the model: model/ in the folder of a run, or `folder` itself.

    Raises:
        UserError: there is no model, or it is not one of transformers.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: give the --output_dir of a run, or the folder of a model")
    model = folder / "model" if (folder / "model").is_dir() or (folder / "config.yaml").is_file() else folder
    if not model.is_dir():
        raise UserError(f"{folder} has no model/, which a run writes at its end: let the run finish first")
    if not (model / "config.json").is_file():
        raise UserError(
            f"{model} has no config.json: predictions need a model of transformers, as save_pretrained writes it"
        )
    return model


def settings_class(model: Path) -> type[Settings]:
    """The class of the settings for a model, by the class of the model that its config.json names.

    A model in the files of sentence-transformers gives embeddings.

    Raises:
        UserError: this kind of model has no predictions.
    """
    try:
        name = str((json.loads((model / "config.json").read_text()).get("architectures") or ["no class"])[0])
    except (ValueError, AttributeError) as error:
        raise UserError(f"{model / 'config.json'} is malformed ({error}): restore the file") from None
    if name.endswith("ForSequenceClassification"):
        return TextSettings
    if name.endswith("ForImageClassification"):
        return ImageSettings
    if name.endswith("ForTokenClassification"):
        return TagSettings
    if (model / MODULES_FILE).is_file():
        return EmbeddingSettings
    if name.endswith("ForMaskedLM"):
        raise UserError(
            f"{model} is a masked language model ({name}), which has nothing to predict for a file: fine-tune it with "
            f"recipes/nlp.py --model_name_or_path {model}"
        )
    *others, last = WHAT.values()
    raise UserError(f"{model} is a {name}: predictions need {', '.join(others)} or {last}")


def budget_of_run(stored: Mapping[str, Any]) -> dict[str, int]:
    """The budget of a forward pass: twice that of a run's micro-batch, as in its evaluation."""
    limits = stored.get("max_tokens_per_micro_batch"), stored.get("per_device_train_batch_size")
    return {name: 2 * limit for name, limit in zip(BUDGET, limits, strict=True) if limit}


def longest_text(model: Path) -> int:
    """The maximum number of tokens of a text: the smaller limit of the model and its tokenizer.

    Raises:
        UserError: neither has a limit.
    """
    found = []
    for file, name in (("tokenizer_config.json", "model_max_length"), ("config.json", "max_position_embeddings")):
        if (model / file).is_file():
            limit = json.loads((model / file).read_text()).get(name)
            found += [int(limit)] if limit and 0 < limit < NO_LIMIT else []
    if not found:
        raise UserError(f"--max_length is needed: neither {model} nor its tokenizer limits the length of a text")
    return min(found)


def default_output(folder: Path, file: str | None, possible: tuple[str, ...]) -> Path:
    """OUTPUT_DIR/predictions/NAME in the format of FILE: CSV, JSON lines or Parquet.

    Parquet for the validation data of a run, and otherwise the first `possible` format if that of FILE is not possible.

    Raises:
        UserError: FILE is a pattern, which gives no name.
    """
    if file is None:
        return folder / "predictions" / "validation.parquet"
    if glob.has_magic(file) and not Path(file).exists():
        raise UserError(f"FILE {file} names several files: name the output with --predictions_file")
    name = Path(file).resolve().name
    kind = kind_of(Path(name))
    stem = name[: name.lower().rindex(kind)] if kind else name
    format_ = {".json": ".jsonl", ".tsv": ".csv"}.get(kind, kind)
    return folder / "predictions" / (stem + (format_ if format_ in possible else possible[0]))
