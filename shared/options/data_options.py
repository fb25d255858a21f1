"""The settings of training and validation data, in addition to those of `ExtraOptions`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shared.config.fields import Limits, Meaning
from shared.errors import UserError
from shared.options.extra_options import ExtraOptions


@dataclass(frozen=True, kw_only=True)
class DataOptions(ExtraOptions):
    """Settings of data from files, folders and the Hub. The loaders in shared/datasets and shared/images read them."""

    dataset_name: Annotated[str | None, Meaning.NAMES_DATA, Meaning.MAY_BE_ON_HUB] = None
    """Dataset on the Hub, or a folder written by save_to_disk. None: --train_file, or the recipe's default data."""
    dataset_config_name: str | None = None
    """Configuration of --dataset_name, such as mrpc for nyu-mll/glue."""
    train_split_name: str | None = None
    """Training split of --dataset_name. None: train, or training."""
    validation_split_name: str | None = None
    """Validation split of --dataset_name. None: the first that exists of validation, valid, val, dev, eval, test."""
    train_file: Annotated[tuple[str, ...] | None, Meaning.NAMES_DATA] = None
    """Your own training data, instead of --dataset_name: files, 'patterns/*.csv' or folders, sorted by name."""
    validation_file: Annotated[tuple[str, ...] | None, Meaning.NAMES_DATA] = None
    """Validation data for --train_file. None: --validation_split_percentage of the training data."""
    csv_delimiter: str | None = None
    """Column separator of .csv and .tsv files, such as ';'. None: a comma in .csv files, a tab in .tsv files."""
    validation_split_percentage: Annotated[int, Limits(least=1, most=99)] = 10
    """Percentage of the training data held out for validation, if there is no validation or test split."""
    skip_incomplete_rows: bool = False
    """Skip rows without text, image or label, and print how many. Otherwise such a row is an error."""
    max_train_samples: int | None = None
    """Train on a random subset of this many rows, which depends on --seed. None: all rows."""
    max_eval_samples: int | None = None
    """Validate on a random subset of this many rows, which depends on --seed. None: all rows."""

    NEEDS: ClassVar = (
        *ExtraOptions.NEEDS,
        ("dataset_config_name", "dataset_name"),
        ("train_split_name", "dataset_name"),
        ("validation_split_name", "dataset_name"),
        ("validation_file", "train_file"),
        ("csv_delimiter", "train_file"),
    )
    EXCLUDES: ClassVar = (*ExtraOptions.EXCLUDES, ("dataset_name", "train_file"))

    def check_values(self) -> None:
        """As in the base class; checks --csv_delimiter, too."""
        super().check_values()
        mark = "," if self.csv_delimiter is None else self.csv_delimiter
        if mark != r"\t" and not (len(mark) == 1 and mark.isascii() and mark not in '"\r\n'):
            raise UserError(f"--csv_delimiter {mark!r}: must be one character such as ';', or '\\t' for a tab")
