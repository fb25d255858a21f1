"""Regression on images: a column of numbers is the target, from loading and augmentation to the exported scale."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from small_images import EIGHT, config, encoded, folders
from torch.nn import functional as F

from shared.augmentation.augmentation import Augmentation, AugmentationOptions
from shared.cache import prepared
from shared.cache.prepared import mapped_file
from shared.errors import UserError
from shared.images import sources
from shared.images.image_models import make_classifier
from shared.images.images import collate, load_images
from shared.losses.losses import Scale
from shared.plan.batches import Plan

SIZES = {"embedding_size": 8, "hidden_sizes": (8,), "depths": (1,), "layer_type": "basic", "zero_init_last_norm": False}


@pytest.fixture
def given(tmp_path):
    """A file of 60 grey images; the target is 1000 + 3 times the grey."""
    greys = [4 * i for i in range(60)]
    images = [encoded(Image.new("RGB", (12, 10), (grey, grey, grey))) for grey in greys]
    table = pa.table({"image": images, "price": [1000.0 + 3 * grey for grey in greys]})
    pyarrow.parquet.write_table(table, tmp_path / "prices.parquet")
    sizes = SIZES | {"freeze_backbone": False, "from_scratch": True, "image_size": None}
    return config(train_file=str(tmp_path / "prices.parquet"), label_column_name="price", cache="uint8", **sizes)


def test_a_model_learns_the_numbers_in_a_column_of_images(given):
    train, validation = load_images(given, EIGHT, "regression")
    assert (len(train), len(validation), train.targets.dtype) == (48, 12, np.float64)
    torch.manual_seed(0)
    model = make_classifier(given, ("score",))
    scale = Scale.of_run(train.source.labels, train.targets, model)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    plan = Plan(num_samples=len(train), seed=0, global_batch_size=16, max_steps=60, micro_batches=2)
    how = Augmentation(AugmentationOptions(min_crop_area=0.5, horizontal_flip=True), EIGHT)
    for step in range(60):
        for micro_batch in plan.micro_batches(step):
            batch = collate(train.read_micro_batch(micro_batch.samples, micro_batch.epochs))
            images, targets = how.training(micro_batch, batch)
            predicted = model(pixel_values=images).logits[:, 0]
            (F.mse_loss(predicted, scale.standardize(targets.labels), reduction="sum") / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    scale.before_export(model)
    batch = collate(validation.read_micro_batch(np.arange(len(validation)), np.zeros(len(validation), int)))
    with torch.no_grad():
        found = model.eval()(pixel_values=how.evaluation(batch)).logits[:, 0]
    assert float((found - batch["labels"]).abs().mean()) < 0.2 * validation.targets.std()


def test_numbers_are_held_out_and_limited_in_blocks_as_in_memory(given, monkeypatch):
    given.max_train_samples = 20

    def read():
        return [(data.digest(), data.targets.tolist(), str(data), len(data)) for data in load(given)]

    def load(given):
        return load_images(given, EIGHT, "regression")

    whole = read()
    monkeypatch.setattr(prepared, "IN_MEMORY", -1)
    monkeypatch.setattr(sources, "BLOCK", 7)
    assert read() == whole
    assert mapped_file(load(given)[0].targets) is not None
    assert [count for *_, count in whole] == [20, 12]


def test_classes_are_no_numbers(tmp_path, given):
    with pytest.raises(UserError, match="has classes, and regression needs a column of numbers"):
        load_images(config(train_dir=str(folders(tmp_path / "photos"))), EIGHT, "regression")
    given.label_column_name = "image"
    with pytest.raises(UserError, match="--label_column_name image"):
        load_images(given, EIGHT, "regression")
