"""The training and validation tables of a recipe that learns labels, and the meaning of the labels."""

from typing import Any

import numpy as np
import pyarrow as pa

from shared.datasets.labels import Labels
from shared.datasets.tables import limited, load_tables
from shared.pretrained.from_pretrained import label_order


def load_labeled(config: Any) -> tuple[pa.Table, pa.Table, Labels]:
    """The training rows, the validation rows and the labels, in the order of the pretrained model's outputs.

    Without validation data, --validation_split_percentage of each label's rows are held out, chosen by --seed.

    Raises:
        UserError: the data cannot be read, or the labels cannot be learned.
    """

    def learn(table: pa.Table) -> Labels:
        return Labels.from_table(table, config.label_column_name, config.problem_type, config.label_delimiter)

    def targets_of(table: pa.Table) -> np.ndarray:
        return learn(table).encode(table)

    columns, label_columns = config.text_column_names, config.label_column_name
    train, validation = load_tables(config, columns, label_columns, config.problem_type, targets_of)
    labels = learn(train)
    if config.model_name_or_path and labels.names:
        labels = labels.ordered(label_order(config.model_name_or_path, labels.names, config.revision))
    return *limited((train, validation), config), labels
