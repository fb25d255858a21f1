"""The tables of a text recipe that learns labels, and what these mean."""

from typing import Any

import numpy as np
import pyarrow as pa

from shared.datasets.labels import Labels
from shared.datasets.tables import limited, load_tables
from shared.pretrained.from_pretrained import label_order


def load_labeled(config: Any) -> tuple[pa.Table, pa.Table, Labels]:
    """The training and the validation rows that a config names, and their labels, in the order that its model has.

    Where there is no validation part, --validation_split_percentage of each label is held out, chosen by --seed.

    Raises:
        UserError: data that cannot be read, or labels that cannot be learned.
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
