"""Measure the head of a masked language model: time and memory of a forward and backward pass.

    python benchmarks/mlm_head.py --output_dir out/mlm_head
    python benchmarks/mlm_head.py --compare losses --output_dir out/chunked_loss

--compare heads: a head on the masked tokens only against the dense head, in a BERT (4 layers x 256, vocabulary 8,192).
--compare losses: the loss of all logits at once, of chunks (--chunked_loss), and of torch's `F.linear_cross_entropy`
with its own choice of chunks, in a ModernBERT (2 layers x 768, vocabulary 50,368), at the masked tokens only.

All have the same rows and the same masked tokens. They take turns; each turn is a process of one thread. Writes
mlm_head.json or chunked_loss.json into the output folder.
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
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.rounds import command, machine, turns

ROWS, LENGTH, SHARE = 16, 128, 0.3
KINDS = {"heads": ("dense", "sparse"), "losses": ("all logits", "chunked", "linear_cross_entropy")}
FILES = {"heads": "mlm_head.json", "losses": "chunked_loss.json"}
SMALL = {"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 1024, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LARGE = {"vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12}
LARGE |= {"intermediate_size": 1152, "pad_token_id": 0}


def make_model(kind: str) -> Any:
    """The model of a contestant, with its head."""
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    from shared.encoders.chunked_loss import use_chunked_loss
    from shared.encoders.masked_head import predict_only_masked

    heads = kind in KINDS["heads"]
    model: Any = BertForMaskedLM(BertConfig(**SMALL)) if heads else ModernBertForMaskedLM(ModernBertConfig(**LARGE))
    if kind != "dense":
        predict_only_masked(model)
    if kind in ("chunked", "linear_cross_entropy"):
        use_chunked_loss(model)
    return model.train()


def loss_of_torch(hidden: Any, weight: Any, bias: Any, targets: Any) -> Any:
    """The sum of the losses by `F.linear_cross_entropy`, in place of shared.encoders.chunked_loss.cross_entropy."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from shared.encoders.chunked_loss import Losses

    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    bias = None if bias is None else bias.to(dtype)
    total = F.linear_cross_entropy(
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        linear_bias=bias,
        reduction="sum",
        options=nn.LinearCrossEntropyOptions(),
    )
    return Losses(total, hidden.new_zeros(len(targets)), None)


def measure(kind: str, passes: int, bf16: bool = False) -> dict[str, float]:
    """One contestant: seconds of a pass, the loss, and by how many MiB the passes raise the peak of memory."""
    import torch
    from torch.nn import functional as F

    from shared.encoders import chunked_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(kind)
    ids = torch.randint(5, model.config.vocab_size, (ROWS, LENGTH))
    masked = torch.randperm(ids.numel())[: int(SHARE * ids.numel())].sort().values
    targets = ids.flatten()[masked]
    labels = torch.full((ids.numel(),), -100).index_copy(0, masked, targets).view(ROWS, LENGTH)

    def run() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if kind == "dense":
                loss = model(input_ids=ids, labels=labels).loss
            elif kind in ("sparse", "all logits"):
                logits = model(input_ids=ids, masked=masked).logits
                loss = F.cross_entropy(logits.float(), targets)
            else:
                loss = model(input_ids=ids, masked=masked, labels=targets).total / len(targets)
        loss.backward()
        model.zero_grad(set_to_none=False)
        return loss.item()

    loss = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    computed = loss_of_torch if kind == "linear_cross_entropy" else chunked_loss.cross_entropy
    with mock.patch.object(chunked_loss, "cross_entropy", computed):
        for _ in range(passes + 2):  # the first two warm up
            started = time.process_time()
            loss = run()
            seconds.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(seconds[2:]), "loss": loss, "peak_mib": (peak - before) / 1024}


def compare(rows: list[dict[str, Any]], first: str, other: str) -> dict[str, float]:
    """Medians of the ratios within each round, `other` beside `first`, and the largest difference of the loss."""
    pairs = [
        (one, row)
        for one in rows
        for row in rows
        if (one["kind"], row["kind"], one["round"]) == (first, other, row["round"])
    ]
    return {
        "faster": statistics.median(one["seconds"] / row["seconds"] for one, row in pairs),
        "memory": statistics.median(row["peak_mib"] / one["peak_mib"] for one, row in pairs),
        "loss_difference": max(abs(row["loss"] / one["loss"] - 1) for one, row in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/mlm_head"))
    parser.add_argument("--compare", choices=list(KINDS), default="heads")
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=5, help="timed passes per round")
    parser.add_argument("--kind", choices=[kind for kinds in KINDS.values() for kind in kinds], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:  # one turn, in this process
        print(json.dumps(measure(arguments.kind, arguments.passes, arguments.bf16)))
        return
    rows = []
    first, *others = KINDS[arguments.compare]
    for round_, kind in turns((first, *others), arguments.rounds):
        words = [sys.executable, __file__, "--kind", kind, "--passes", str(arguments.passes)]
        words += ["--bf16"] * arguments.bf16
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({"kind": kind, "round": round_, **json.loads(done.stdout.splitlines()[-1])})
        print(rows[-1], flush=True)
    report: dict[str, Any] = {"machine": machine(1), "command": command(), "rows": rows}
    found = {other: compare(rows, first, other) for other in others}
    report |= found[others[0]] if arguments.compare == "heads" else found
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / FILES[arguments.compare]).write_text(json.dumps(report, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
