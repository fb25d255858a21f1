"""Families of image classifiers train, export, and reach the reported score in a pipeline, as docs/images.md says."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
import transformers
from PIL import Image

from shared.config import options
from shared.errors import UserError
from shared.images.image_models import adapt_to_device, geometry_of, load_geometry, normalization_of
from shared.models.optimizers import muon_groups
from shared.models.trainable import backbone
from shared.options.image_options import ImageOptions
from shared.processes import rules

pytestmark = pytest.mark.usefixtures("one_cpu_process_without_a_picture")

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PATCHES = WIDE | {"image_size": 32, "patch_size": 8}
TWO_TOWERS = {"vision_config": PATCHES, "text_config": WIDE | {"vocab_size": 50}}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
PYRAMID = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
# Prefix of the model's class: (prefix of its image processor's class, sizes of a small model).
FAMILIES = {
    "Beit": ("Beit", PATCHES),
    "Bit": ("Bit", {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_groups": 4}),
    "CLIP": ("CLIP", TWO_TOWERS | {"projection_dim": 16}),
    "ConvNext": ("ConvNext", STAGES | {"num_stages": 2}),
    "ConvNextV2": ("ConvNext", STAGES | {"num_stages": 2}),
    "DeiT": ("DeiT", PATCHES),
    "Dinov2": ("Bit", PATCHES),
    "EfficientNet": ("EfficientNet", {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320}),
    "FocalNet": ("Bit", {"embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]}),
    "MobileNetV2": ("MobileNetV2", {"depth_multiplier": 0.125, "image_size": 32}),
    "PoolFormer": ("PoolFormer", {"hidden_sizes": [8] * 4, "depths": [1] * 4}),
    "Pvt": ("Pvt", PYRAMID | {"image_size": 32}),
    "RegNet": ("ConvNext", {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "groups_width": 8}),
    "ResNet": ("ConvNext", STAGES | {"embedding_size": 8, "layer_type": "basic"}),
    "Segformer": ("Segformer", PYRAMID),
    "Siglip": ("Siglip", TWO_TOWERS),
    "Swin": ("ViT", WINDOWS),
    "Swinv2": ("ViT", WINDOWS),
    "ViT": ("ViT", PATCHES),
    "ViTMSN": ("ViT", PATCHES),
}


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("image_classification")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Dark and light images of 32 x 32 with noise, in folders of splits and classes."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 6)):
        for label, level in (("dark", 40), ("light", 140)):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = (level + rng.integers(0, 70, (32, 32, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{i}.png")
    return root


def write_model(folder, family, processor=True, **changed):
    """Write a model of several labels per image, with random weights, and an image processor for 32 x 32 pixels."""
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(problem_type="multi_label_classification", **sizes)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForImageClassification")(config).save_pretrained(folder)
    if processor:
        made = getattr(transformers, f"{kind}ImageProcessorPil")(**changed)
        for name in ("size", "crop_size"):
            if edges := getattr(made, name, None):
                setattr(made, name, dict.fromkeys(dict(edges), 32))
        made.save_pretrained(folder)
    return folder


def config_of(recipe, folder, images, *flags):
    sizes = ["--global_batch_size", 12, "--per_device_train_batch_size", 6, "--max_train_steps", 3, "--eval_steps", 3]
    data = ["--train_dir", images / "train", "--validation_dir", images / "val"]
    data += ["--peak_tflops", 1, "--learning_rate", 0.5]
    flags = ["--model_name_or_path", folder / "given", "--output_dir", folder / "run", *sizes, *data, *flags]
    return options.parse(recipe.Config, [*map(str, flags)])


# They have no message of their own in docs/images.md, and layers like those of another family.
SIMILAR = ("Beit", "ConvNextV2", "DeiT", "FocalNet", "MobileNetV2", "PoolFormer", "Pvt", "RegNet", "Swinv2", "ViTMSN")
CASES = [pytest.param(family, marks=[pytest.mark.docs] * (family in SIMILAR)) for family in FAMILIES]


@pytest.mark.parametrize("family", CASES)
def test_each_family_trains_and_its_export_gives_the_reported_score(recipe, tmp_path, images, family):
    write_model(tmp_path / "given", family)
    results = recipe.main(config_of(recipe, tmp_path, images))
    frozen = recipe.build_model(config_of(recipe, tmp_path, images, "--freeze_backbone"), ("dark", "light"))
    below = {id(p) for p in backbone(frozen).parameters()}
    trained = [p for p in frozen.parameters() if p.requires_grad]
    assert trained
    assert not below & {*map(id, trained)}
    assert not backbone(frozen.train()).training
    frozen(pixel_values=torch.rand(2, 3, 32, 32)).logits.sum().backward()
    assert all(p.grad is not None for p in trained)
    model = recipe.build_model(config_of(recipe, tmp_path, images), ("dark", "light"))
    muon = next(group for group in muon_groups(model, 0.1) if group["use_muon"])
    assert {*map(id, muon["params"])} < {id(p) for p in backbone(model).parameters()}

    classify = transformers.pipeline("image-classification", model=str(tmp_path / "run/model"), top_k=None)
    files = sorted((images / "val").rglob("*.png"))
    predictions = classify([str(file) for file in files])
    scores = [{answer["label"]: answer["score"] for answer in answers} for answers in predictions]
    right = np.array([found[file.parent.name] for found, file in zip(scores, files, strict=True)])
    assert np.mean(right > 0.5) == pytest.approx(results["eval_accuracy"], abs=1e-6)
    assert -np.log(right).mean() == pytest.approx(results["eval_loss"], rel=2e-3)


@pytest.mark.parametrize("family", ["ViT", "DeiT", "ViTMSN"])
def test_a_vit_at_another_resolution_interpolates_like_transformers(recipe, tmp_path, images, family, capsys):
    given = write_model(tmp_path / "given", family)
    config = config_of(recipe, tmp_path, images, "--image_size", 48)
    model = recipe.build_model(config, ("dark", "light")).eval()
    said = "--image_size 48: the position embeddings of .*given, made for 32 x 32, are interpolated"
    assert re.search(said, capsys.readouterr().err)
    expected = transformers.AutoModelForImageClassification.from_pretrained(given).eval()
    pixels = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        found = backbone(model)(pixel_values=pixels)[0]
        wanted = backbone(expected)(pixel_values=pixels, interpolate_pos_encoding=True)[0]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_the_table_of_families_lists_the_tested_ones():
    text = (runs.ROOT / "docs/images.md").read_text()
    table = text[text.index("| family |") :].split("\n\n")[0]
    assert {*re.findall(r"`(\w+)ForImageClassification`", table)} == {*FAMILIES}


def test_without_an_image_processor_the_config_or_a_flag_gives_the_size(recipe, tmp_path, images, capsys):
    for family, flags, expected in (
        ("CLIP", [], "images are 32 x 32, normalized as for ImageNet"),
        ("RegNet", ["--image_size", 32], "images are 32 x 32, normalized"),
    ):
        write_model(tmp_path / family / "given", family, processor=False)
        geometry = load_geometry(config_of(recipe, tmp_path / family, images, *flags))
        assert (geometry.size, geometry.mean) == (32, (0.485, 0.456, 0.406))
        assert expected in capsys.readouterr().err
    with pytest.raises(UserError, match="has no image processor, and its config has no image_size: give --image_size"):
        recipe.load_data(config_of(recipe, tmp_path / "RegNet", images))


def test_a_size_or_a_model_that_does_not_fit_is_refused_in_one_line(recipe, tmp_path, images, monkeypatch):
    write_model(tmp_path / "given", "CLIP")
    write_model(tmp_path / "new/given", "ViT")
    for folder, kind, flag, size in (("", "CLIP", "--image_size", 48), ("new", "ViT", "--train_image_size", 16)):
        message = runs.refusal(recipe.main, config_of(recipe, tmp_path / folder, images, flag, size))
        assert f"a {kind}ForImageClassification cannot take images of {size} x {size}" in message
    config = config_of(recipe, tmp_path / "new", images, "--image_size", 48, "--resize_size", 47)
    assert "--resize_size 47 is below --image_size 48" in runs.refusal(recipe.main, config)
    without_logits = SimpleNamespace(last_hidden_state=torch.zeros(2, 2))  # as of a PPLCNet
    with monkeypatch.context() as patch:
        patch.setattr(transformers.ViTForImageClassification, "forward", lambda *_, **__: without_logits)
        message = runs.refusal(recipe.main, config_of(recipe, tmp_path / "new", images))
    assert "a ViTForImageClassification cannot take images of 32 x 32: 'types.SimpleNamespace' object has no" in message
    recipe.main(config_of(recipe, tmp_path / "new", images, "--image_size", 48, "--from_scratch"))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("EfficientNet", {}),  # divides by the standard deviation twice
        ("EfficientNet", {"rescale_offset": True, "rescale_factor": 1 / 127.5, "do_normalize": False}),
        ("ViT", {"do_normalize": False}),
        ("ViT", {"image_std": (0.2, 0.3, 0.4)}),
    ],
)
def test_normalization_is_measured_from_the_processor_and_not_read_from_its_settings(kind, changed):
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**changed)
    mean, std = normalization_of(processor, "it")
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    processor.size = {"height": 64, "width": 64}
    found = processor(images=pixels, return_tensors="np")["pixel_values"][0]
    assert np.allclose(found.transpose(1, 2, 0), (pixels / 255 - mean) / std, atol=1e-4)


def test_unusual_processors_give_a_message_or_are_refused(capsys):
    given = type("Given", (), {"model_name_or_path": "it", "image_size": None, "resize_size": None})()
    flipped = transformers.MobileViTImageProcessorPil()
    assert geometry_of(flipped, given).std == (1, 1, 1)
    assert "orders the channels blue, green, red" in capsys.readouterr().err
    nearest = transformers.EfficientNetImageProcessorPil(resample=0)
    assert geometry_of(nearest, given).interpolation == "bicubic"
    assert "uses an unknown resampling (0): bicubic is used instead" in capsys.readouterr().err
    assert geometry_of(transformers.PoolFormerImageProcessorPil(), given).resize == int(224 / 0.9)
    for kind in (transformers.Siglip2ImageProcessorPil, transformers.BridgeTowerImageProcessorPil):
        assert "its image processor makes no squares" in runs.refusal(geometry_of, kind(), given)
    with pytest.raises(UserError, match="its image processor makes no images"):
        geometry_of(transformers.ImageGPTImageProcessorPil(), given)


@pytest.mark.parametrize("flag", [False, True])
def test_channels_last_computes_the_same_and_cudnn_benchmark_is_refused_on_a_cpu(monkeypatch, flag):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.manual_seed(0)
    first = transformers.ResNetForImageClassification(transformers.ResNetConfig(**FAMILIES["ResNet"][1]))
    config = SimpleNamespace(**vars(ImageOptions()) | {"channels_last": True, "cudnn_benchmark": flag})
    on_gpu = SimpleNamespace(device=torch.device("cuda"))  # nothing is moved there
    last = adapt_to_device(on_gpu, config, copy.deepcopy(first))
    assert torch.backends.cudnn.benchmark is flag
    kernels = [p for p in last.parameters() if p.ndim == 4 and p.shape[2] > 1]
    assert kernels
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
    images = torch.randn(4, 3, 32, 32)
    ordered = images, images.to(memory_format=torch.channels_last)
    logits = [model.train()(pixel_values=given).logits for model, given in zip((first, last), ordered, strict=True)]
    assert torch.allclose(*logits, atol=1e-5)
    for each in logits:
        each.square().sum().backward()
    for p, q in zip(first.parameters(), last.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5 * float(p.grad.norm()))
    for a, b in zip(first.buffers(), last.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    if flag:
        launch = rules.Launch(ImageOptions(cudnn_benchmark=True), {}, on_cpu=True)
        assert runs.refusal(rules.refuse, launch).startswith("--cudnn_benchmark needs a GPU")
