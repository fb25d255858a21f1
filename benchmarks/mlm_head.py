"""Measure a head on the masked tokens only against the dense head: time and memory of a forward and backward pass.

    python benchmarks/mlm_head.py --output_dir out/mlm_head

Both heads have the same BERT (4 layers x 256, vocabulary 8,192), the same rows and the same masked tokens. They take
turns; each turn is a process of one thread. Writes mlm_head.json into the output folder.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.rounds import command, machine

ROWS, LENGTH, VOCABULARY, SHARE = 16, 128, 8192, 0.3


def measure(kind: str, passes: int) -> dict[str, float]:
    """One kind of head: seconds of a pass, the loss, and by how many MiB the passes raise the peak of memory."""
    import torch
    from torch.nn import functional as F
    from transformers import BertConfig, BertForMaskedLM

    from shared.encoders.masked_head import predict_only_masked

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    masked = torch.randperm(ids.numel())[: int(SHARE * ids.numel())].sort().values
    targets = ids.flatten()[masked]
    labels = torch.full((ids.numel(),), -100).index_copy(0, masked, targets).view(ROWS, LENGTH)
    if kind == "sparse":
        predict_only_masked(model)

    def run() -> float:
        if kind == "sparse":
            loss = F.cross_entropy(model(input_ids=ids, masked=masked).logits, targets)
        else:
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        model.zero_grad(set_to_none=False)
        return loss.item()

    loss = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(passes + 2):  # the first two warm up
        started = time.process_time()
        loss = run()
        seconds.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(seconds[2:]), "loss": loss, "peak_mib": (peak - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/mlm_head"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=5, help="timed passes per round")
    parser.add_argument("--kind", choices=["dense", "sparse"], help="measure this head only, in this process")
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps(measure(arguments.kind, arguments.passes)))
        return
    rows = []
    for round_ in range(arguments.rounds):
        for kind in ("dense", "sparse"):
            words = [sys.executable, __file__, "--kind", kind, "--passes", str(arguments.passes)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"kind": kind, "round": round_, **json.loads(done.stdout.splitlines()[-1])})
            print(rows[-1], flush=True)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    report = {
        "machine": machine(1),
        "command": command(),
        "rows": rows,
        "faster": statistics.median(dense["seconds"] / sparse["seconds"] for dense, sparse in pairs),
        "memory": statistics.median(sparse["peak_mib"] / dense["peak_mib"] for dense, sparse in pairs),
        "loss_difference": max(abs(sparse["loss"] / dense["loss"] - 1) for dense, sparse in pairs),
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "mlm_head.json").write_text(json.dumps(report, indent=1) + "\n")
    print({name: report[name] for name in ("faster", "memory", "loss_difference")})


if __name__ == "__main__":
    main()
