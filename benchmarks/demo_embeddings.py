"""What `make demo-embeddings` prints before it trains MiniLM: the scores of TF-IDF and of MiniLM without training.

    python benchmarks/demo_embeddings.py NEW_FOLDER

Prints the flags of recipes/embeddings.py for the training to stdout: none if MiniLM cannot be downloaded, so that a new
encoder is trained. All else goes to stderr. The folder gets the validation pairs and their vectors.
"""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import baselines

# A part of the training data, so that the demo takes less than five minutes on two cores.
FLAGS = ["--model_name_or_path", baselines.PACKAGES / "minilm", "--num_train_epochs", 1, "--max_train_samples", 3584]
FLAGS += ["--learning_rate", "1e-4"]


def main(folder: Path) -> None:
    import pyarrow.parquet as pq

    data = baselines.data_of("pairs", seed=0)
    scores = baselines.tfidf_retrieval(*data)
    shown = "  ".join(f"eval_{name} {value:.4g}" for name, value in scores.items())
    print(f"TF-IDF, without training: {shown}", file=sys.stderr)
    try:
        baselines.download_model()
    except subprocess.CalledProcessError:
        print("MiniLM cannot be downloaded: a new encoder is trained, which scores less than TF-IDF", file=sys.stderr)
        return
    folder.mkdir(parents=True)
    pq.write_table(data[1], folder / "validation.parquet")
    print("MiniLM, without training:", file=sys.stderr, flush=True)
    command = ["-m", "shared.predict", FLAGS[1], folder / "validation.parquet", "--max_length", 64]
    command += ["--predictions_file", folder / "vectors.parquet"]
    subprocess.run([sys.executable, *map(str, command)], stdout=sys.stderr, check=True)
    print(*FLAGS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
