"""Images whose JPEGs a GPU decodes. On a CPU, Pillow stands in for torchcodec, with the same interface and errors."""

import sys

import numpy as np
import pytest
import runs
import torch
from PIL import Image, ImageOps
from small_images import close, config, corners, encoded, quarters

from shared.config import options
from shared.errors import UserError
from shared.images import gpu_decoding
from shared.images.decoding import CorruptImage, Square, decode, opened
from shared.images.geometry import Geometry
from shared.images.images import Images, ImagesOnGPU, collate, load_images
from shared.images.sources import class_folders
from shared.monitoring import evaluation
from shared.plan.batches import evaluation_batches
from shared.plan.loading import feed

CPU = torch.device("cpu")
SIZE = 16
GEOMETRY = Geometry(SIZE, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear")


load_decoder = gpu_decoding.load_decoder  # before a test replaces it


def decode_jpeg(source, *, device):
    """As `torchcodec.decoders.decode_jpeg` for a list of encoded tensors."""
    images = []
    for data in source:
        assert (data.dtype, data.ndim, data.device.type) == (torch.uint8, 1, "cpu")
        try:
            with opened(bytes(data.numpy())) as image:
                pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except CorruptImage as problem:
            raise RuntimeError(f"nvjpegDecode failed: {problem}\nException raised from decode_software") from None
        images.append(torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(device))
    return images


@pytest.fixture
def torchcodec(monkeypatch):
    """Pillow in the place of torchcodec."""
    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda: decode_jpeg)


@pytest.fixture
def gpu(torchcodec, monkeypatch):
    """A GPU that `require_decoder` finds."""
    monkeypatch.setattr(gpu_decoding.torch.cuda, "is_available", lambda: True)


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def stored_images():
    """{name: (bytes, whether a GPU decodes them)}, none large enough for Pillow to decode it at half its size."""
    wide, high = quarters(60, 40), quarters(30, 50)
    return {
        "a wide.jpg": (encoded(wide, "JPEG", quality=95), True),
        "b high.jpg": (encoded(high, "JPEG", quality=95, subsampling=0), True),
        "c.png": (encoded(quarters()), False),
        "d turned.jpg": (encoded(wide, "JPEG", quality=95, exif=turned(6)), True),
        "e mirrored.jpg": (encoded(wide, "JPEG", quality=95, exif=turned(2)), True),
        "f grey.jpg": (encoded(high.convert("L"), "JPEG", quality=95), True),
        "g four colors.jpg": (encoded(wide.convert("CMYK"), "JPEG", quality=95), False),
        "h as RGB.jpg": (encoded(wide, "JPEG", quality=95, keep_rgb=True), False),
        "i progressive.jpg": (encoded(wide, "JPEG", quality=95, progressive=True), True),
        "j two.jpg": (encoded(wide, "MPO", save_all=True, append_images=[high]), False),
    }


@pytest.fixture
def source(tmp_path):
    """The images in two classes, in the order of their names."""
    for i, (name, (content, _)) in enumerate(stored_images().items()):
        folder = tmp_path / "images" / ("first" if i < 5 else "second")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return class_folders(str(tmp_path / "images"), "--train_dir")


@pytest.mark.parametrize("name", stored_images())
def test_a_gpu_decodes_the_jpegs_that_nvjpeg_decodes_with_the_right_colors(name, tmp_path):
    content, expected = stored_images()[name]
    found = gpu_decoding.read_jpeg(content)
    assert (found is not None) == expected
    if found:
        assert found[0] == content
        assert found[1] == decode(content, Square(SIZE))[1]
    (tmp_path / "file").write_bytes(content)
    assert gpu_decoding.read_jpeg(tmp_path / "file") == found


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [SIZE, 40, 9])
def test_an_image_is_scaled_as_by_pillow(interpolation, side):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (7, 7, 3), np.uint8)).resize((63, 41), Image.Resampling.BICUBIC)
    expected = np.asarray(image.resize((side, side), Image.Resampling[interpolation.upper()]), int)
    found = gpu_decoding.squeeze(
        torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())[None], side, interpolation
    )
    assert found.dtype == torch.uint8
    assert np.abs(found[0].numpy() - expected).max() <= 2
    assert np.abs(found[0].numpy() - expected).mean() < 0.2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_have_the_images_of_pillow_in_their_order(torchcodec, source, num_workers, monkeypatch):
    monkeypatch.setattr(gpu_decoding, "AT_ONCE", 3)
    pillow, on_gpu = Images(source, Square(SIZE)), ImagesOnGPU(source, Square(SIZE))
    batches = evaluation_batches(pillow.lengths, None, 4)
    pairs = [[*feed(batches, data, collate, CPU, num_workers)] for data in (pillow, on_gpu)]
    assert [micro_batch.samples.tolist() for micro_batch, _ in pairs[1]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for (_, expected), (_, found) in zip(*pairs, strict=True):
        assert found.keys() == expected.keys()
        assert all(found[name].dtype == expected[name].dtype for name in found)
        assert torch.equal(found["labels"], expected["labels"])
        assert torch.equal(found["aspects"], expected["aspects"])
        assert (found["images"].int() - expected["images"].int()).abs().max() <= 1
    turned = pairs[1][0][1]["images"][3]
    assert close(corners(turned), corners(decode(stored_images()["d turned.jpg"][0], Square(SIZE))[0]))


def test_a_batch_without_a_jpeg_and_one_with_nothing_else(torchcodec, source):
    on_gpu = ImagesOnGPU(source, Square(SIZE))
    for samples in ([2, 6], [0, 1]):
        batch = on_gpu.put_on_device(None, collate(on_gpu.read_micro_batch(np.array(samples), None)), CPU)
        expected = np.stack([decode(source.stored(i), Square(SIZE))[0] for i in samples]).astype(int)
        assert np.abs(batch["images"].numpy() - expected).max() <= 1


def test_the_error_names_the_image_that_nvjpeg_cannot_decode(torchcodec, source):
    path = source.paths[4]
    path.write_bytes(path.read_bytes()[:-150])  # after the check at the start of a run
    for data in ([3, 4, 5], [4]):
        batches = evaluation_batches(np.ones(len(data)), None, 8)
        with pytest.raises(UserError) as caught:
            [*feed(batches, ImagesOnGPU(source.take(np.array(data)), Square(SIZE)), collate, CPU)]
        assert str(path) in str(caught.value)
        assert "cannot be decoded by nvJPEG (nvjpegDecode failed: " in str(caught.value)
        assert "\n" not in str(caught.value)


def test_pillow_decodes_the_validation_images(gpu, source, tmp_path):
    given = config(train_dir=str(tmp_path / "images"), image_decoder="torchcodec", validation_split_percentage=40)
    train, validation = load_images(given, GEOMETRY)
    assert (type(train), type(validation)) == (ImagesOnGPU, Images)
    pillow, _ = load_images(
        config(train_dir=str(tmp_path / "images"), validation_split_percentage=40),
        GEOMETRY,
    )
    assert train.digest() == pillow.digest()


def test_a_decoder_that_cannot_be_used_is_refused_in_one_line(source, tmp_path, gpu, monkeypatch):
    def refusal(**changed):
        with pytest.raises(UserError) as caught:
            load_images(
                config(**{"train_dir": str(tmp_path / "images"), "image_decoder": "torchcodec"} | changed),
                GEOMETRY,
            )
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "--cache uint8 once, with Pillow: leave one out" in refusal(cache="uint8")
    assert "of 256 images of the embedded digits, none is a JPEG" in refusal(train_dir=None)
    for label in ("first", "second"):
        (tmp_path / "others" / label).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "others" / label / f"{i}.png").write_bytes(encoded(quarters()))
    message = refusal(train_dir=str(tmp_path / "others"), validation_split_percentage=34)
    assert "has no effect: of 4 images of" in message
    monkeypatch.setitem(sys.modules, "torchcodec", None)  # Python then refuses to import it
    monkeypatch.setattr(gpu_decoding, "load_decoder", load_decoder)
    assert "needs the package torchcodec, 0.16 or later (No module named 'torchcodec" in refusal()
    assert refusal().endswith("pip install 'torchcodec>=0.16', or use pillow")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal() == "--image_decoder torchcodec decodes on a GPU, and there is none: use pillow"


def test_a_run_is_the_same_where_both_decoders_give_the_same_pixels(
    torchcodec, tmp_path, monkeypatch, one_cpu_process_without_a_picture
):
    """Images of the stored size are not scaled, and the stand-in for torchcodec decodes them with Pillow."""
    rng = np.random.default_rng(0)
    for label in ("first", "second"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 256, (16, 16, 3), np.uint8)
            (tmp_path / "photos" / label / f"{i}.jpg").write_bytes(encoded(Image.fromarray(pixels), "JPEG"))
    monkeypatch.setattr(gpu_decoding, "require_decoder", lambda: None)
    monkeypatch.setattr(evaluation.Metrics, "compute", lambda self, *_: dict.fromkeys(self.names, 0.0))
    recipe = runs.load_recipe("image_classification")

    def train(decoder, output):
        flags = [*runs.TINY_IMAGES, "--train_dir", tmp_path / "photos", "--global_batch_size", 8, "--logging_steps", 1]
        flags += ["--max_train_steps", 3, "--eval_steps", 3, "--image_decoder", decoder, "--output_dir", output]
        recipe.main(options.parse(recipe.Config, [*map(str, flags)]))
        return [[line.get("loss"), line.get("eval_loss"), line.get("samples")] for line in runs.metrics(output)]

    assert train("torchcodec", tmp_path / "torchcodec") == train("pillow", tmp_path / "pillow")
    with pytest.raises(UserError, match="--image_decoder was torchcodec, is pillow"):
        train("pillow", tmp_path / "torchcodec")
