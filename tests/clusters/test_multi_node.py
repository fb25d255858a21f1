"""multi_node.yaml connects two machines, simulated by network namespaces."""

import pytest
import runs


@pytest.mark.clusters
def test_multi_node_yaml_gives_the_run_of_one_process(hosts, alone, texts, tmp_path):
    config = runs.ROOT / "accelerate_configs/multi_node.yaml"
    launch = [runs.BIN / "accelerate", "launch", "--config_file", config, "--num_processes", 2]
    launch += ["--mixed_precision", "no", "--main_process_ip", hosts[0][1], "--machine_rank"]
    recipe = ["recipes/nlp.py", *runs.TINY, *texts, "--expect_processes", 2, "--output_dir", tmp_path / "run"]
    started = []
    try:
        for number, (name, _) in enumerate(hosts):
            environment = {"GLOO_SOCKET_IFNAME": f"host{number}", "RES_OPTIONS": "timeout:1 attempts:1"}
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            started.append(runs.start(["ip", "netns", "exec", name, *launch, number, *recipe], **environment))
        printed = ["".join(one.communicate(timeout=240)) for one in started]
    finally:
        for one in started:
            runs.end(one)
    assert [one.returncode for one in started] == [0, 0], printed
    assert runs.distance(runs.weights(tmp_path / "run"), runs.weights(alone)) < 1e-5
