"""report.html of a run of each recipe in Chromium: it fits wide and narrow windows, and its curves can be read off.

`make test-docs` runs this. Chromium is installed with apt if possible.
"""

import csv
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import runs
import toy_data
from PIL import Image
from run_folder import write_run
from training_line import TRAINING

from shared.report import page
from shared.report.mistakes import mistakes

pytestmark = pytest.mark.docs
RECIPES = ("nlp", "regression", "mlm", "token_classification", "embeddings", "image_classification")
SECTIONS = {
    "nlp": ["Scores", "Curves", "Classes", "Most confidently wrong"],
    "regression": ["Scores", "Curves", "Predictions", "Largest errors"],
    "mlm": ["Scores", "Curves"],
    "embeddings": ["Scores", "Curves"],
}
SECTIONS |= dict.fromkeys(("token_classification", "image_classification"), SECTIONS["nlp"])
# Added to a copy of a page, which may then run it: what the page looks like, for `probed`.
PROBE = """
<script>
const needed = document.documentElement.scrollWidth;
const seen = { width: innerWidth, needed, outside: [], overlapping: [], said: [] };
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  for (const [text, box] of texts) {
    const inside = box.left > frame.left - 1 && box.right < frame.right + 1 && box.bottom < frame.bottom + 1;
    if (!inside) seen.outside.push(text);
    for (const [other, at] of texts)
      if (text < other && box.left < at.right && at.left < box.right && box.top < at.bottom && at.top < box.bottom)
        seen.overlapping.push([text, other]);
  }
  const [x, y, text] = JSON.parse(svg.dataset.points).at(-1);
  const place = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: place.x, clientY: place.y }));
  seen.said.push([text, svg.parentElement.querySelector("output").textContent]);
}
seen.sections = [...document.querySelectorAll("h2")].map((title) => title.textContent);
seen.images = [...document.images].map((image) => image.naturalWidth);
parent.postMessage(seen, "*");
</script>
"""
FRAME = """
<!doctype html><body style="margin: 0"><iframe src="{page}" width="{width}" height="900" style="border: 0"></iframe>
<script>onmessage = (event) => {{ document.body.textContent = "SEEN" + JSON.stringify(event.data) + "SEEN"; }};</script>
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A function that starts Chromium with flags and a file, and returns its output."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, names)) and os.getuid() == 0 and shutil.which("apt-get"):
        subprocess.run("apt-get update -qq && apt-get install -qq -y chromium", shell=True, check=False)
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium, and apt-get cannot install it here")
    profile = tmp_path_factory.mktemp("profile")

    def call(file, *flags):
        usual = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        words = [program, *usual, "--enable-logging=stderr", "--virtual-time-budget=5000", *flags, file.as_uri()]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)

    return call


@pytest.fixture(scope="module", params=RECIPES)
def run(request, texts, tmp_path_factory):
    """(name, the folder of a finished run)."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    flags = toy_data.tiny("nlp" if name == "regression" else name, texts, folder)
    if name == "regression":
        for file in texts[1::2]:
            with file.open() as source, (folder / file.name).open("w") as target:
                rows = [(row["text"], len(row["text"]) / 100) for row in csv.DictReader(source)]
                csv.writer(target).writerows([("text", "label"), *rows])
        flags = [folder / word.name if word in texts[1::2] else word for word in flags]
    runs.train("nlp" if name == "regression" else name, folder / "run", *flags)
    return name, folder / "run"


def probed(chromium, text, folder, width):
    """What PROBE finds in a page of this width."""
    free = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert free != text
    (folder / "probed.html").write_text(free.replace("</body>", PROBE + "</body>"))
    (folder / "frame.html").write_text(FRAME.format(page="probed.html", width=width))
    shown = chromium(folder / "frame.html", "--dump-dom", f"--window-size={width},900").stdout
    return json.loads(
        re.search("SEEN(.*)SEEN", shown)[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    )


def check(seen, width):
    """Nothing is wider than the page, no text of a figure is cut or covers another, and each curve can be read off."""
    assert seen["width"] == width
    assert seen["needed"] <= width
    assert seen["outside"] == seen["overlapping"] == []
    assert all(said == text != "" for text, said in seen["said"])


@pytest.mark.parametrize("width", [1280, 375])
def test_the_report_of_each_recipe_fits_and_its_curves_can_be_read_off(chromium, run, tmp_path, width):
    name, folder = run
    seen = probed(chromium, (folder / "report.html").read_text(), tmp_path, width)
    check(seen, width)
    assert seen["sections"] == [*SECTIONS[name], "Where the time went", "Launch card", "Repeat this run"]
    assert len(seen["said"]) >= 8
    assert len(seen["images"]) == (16 if name == "image_classification" else 0)
    assert all(seen["images"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_as_it_is_has_no_error_and_follows_the_color_scheme(chromium, run, tmp_path, scheme):
    dark = ["--blink-settings=preferredColorScheme=0"] * (scheme == "dark")
    shot = tmp_path / "shot.png"
    done = chromium(run[1] / "report.html", f"--screenshot={shot}", "--window-size=1280,1600", *dark)
    assert "CONSOLE" not in done.stderr  # nor a script or a style that the page forbids itself
    with Image.open(shot) as picture:
        pixels = np.asarray(picture.convert("L"))
    assert (pixels[5, 5] < 50) == (scheme == "dark")
    assert (abs(pixels.astype(int) - pixels[5, 5]) > 100).mean() > 0.005  # there is something to read


LONG = "a-very-long-name-without-any-space-" * 5
ODD = [
    [{"step": step, **TRAINING, "loss": "NaN", "grad_norm": "Infinity"} for step in range(1, 9)],
    [{"step": 1, **TRAINING}, {"step": 1, "eval_loss": 0.5, "eval_accuracy": 1.0}],
    [{"step": step * 10**7, **TRAINING, "grad_norm": 10.0**step, "loss": 1e9} for step in range(9)],
]


@pytest.mark.parametrize("lines", ODD, ids=["nan", "one step", "large values"])
def test_the_report_of_an_odd_run_with_a_thousand_classes_and_a_hostile_text_fits(chromium, tmp_path, lines):
    rng = np.random.default_rng(0)
    names = [f"{LONG}{i}" for i in range(1000)]
    true, predicted = rng.integers(0, 1000, (2, 5000))
    evil = "</p><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">" + LONG
    found = mistakes(names, lambda _: {"text": evil}, predicted, rng.random(5000), true) | {"step": 1}
    folder = write_run(tmp_path, lines, found, f"  data  {LONG}\n", run_name=LONG)
    check(probed(chromium, page.page(folder), tmp_path, 375), 375)
    page.write_report(folder)
    done = chromium(folder / "report.html", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert re.search("<title>(.*)</title>", done.stdout)[1] == LONG
