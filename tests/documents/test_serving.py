"""The server of docs/serving.md answers as transformers' pipeline, and leaves no process."""

import csv
import json
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
import runs

from shared import export

LONGEST = 120  # seconds to start, and to end


def ask(address, content=None):
    """The answer of a server to a GET, or to a POST of JSON."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONGEST) as answer:
        return answer.read().decode()


@pytest.mark.docs
def test_the_server_answers_as_the_pipeline_and_leaves_no_process(
    alone, texts, tmp_path, one_cpu_process_without_a_picture, launched_by_nobody
):
    from transformers import pipeline

    model = shutil.copytree(alone, tmp_path / "run") / "model"
    export.export(export.parse_export([str(model)]))
    with texts[3].open(newline="") as file:
        asked = [row["text"] for row in csv.DictReader(file)][:9]
    port = str(runs.free_port())
    address, command = f"http://127.0.0.1:{port}", [sys.executable, "docs/examples/serve.py", model, "--port", port]
    with (tmp_path / "log").open("w") as log:
        server = runs.start(command, output=log, ACCELERATE_USE_CPU="true")
    try:
        for _ in range(LONGEST):
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                assert ask(f"{address}/health") == "ok"
                break
            except urllib.error.URLError:  # not listening, or not ready, yet
                time.sleep(1)
        processes = psutil.Process(server.pid).children(recursive=True)
        answers = [json.loads(ask(f"{address}/predict", {"text": text})) for text in asked]
        server.send_signal(signal.SIGINT)
        server.wait(LONGEST)
        assert processes
        assert not psutil.wait_procs(processes, LONGEST)[1]
    finally:
        runs.end(server)
    expected = pipeline("text-classification", model=str(model))(asked, truncation=True)
    assert [answer["label"] for answer in answers] == [each["label"] for each in expected]
    assert [answer["probability"] for answer in answers] == pytest.approx(
        [each["score"] for each in expected], abs=1e-5
    )
