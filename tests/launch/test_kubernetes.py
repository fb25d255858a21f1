"""The manifests of clusters/kubernetes match the published schemas and each other, and their start command works."""

import os
import re

import kubernetes_validate
import pytest
import runs
import yaml

FOLDER = runs.ROOT / "clusters/kubernetes"
KUBERNETES = "1.34"  # the version of the schemas; they come with the package, so no network is needed
MANIFESTS = [one for path in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
BY_KIND = {one["kind"]: one for one in MANIFESTS}


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_manifest_is_valid(kind):
    kubernetes_validate.validate(BY_KIND[kind], KUBERNETES, strict=True)


def pod():
    return BY_KIND["Job"]["spec"]["template"]["spec"]


def variables():
    return {entry["name"]: entry["value"] for entry in pod()["containers"][0]["env"]}


def test_the_manifests_match_each_other():
    job, service, claim = (BY_KIND[kind] for kind in ("Job", "Service", "PersistentVolumeClaim"))
    spec, container = job["spec"], pod()["containers"][0]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables()["MACHINES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables()["PROCESSES"])
    assert pod()["subdomain"] == service["metadata"]["name"]
    assert variables()["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod()['subdomain']}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert str(service["spec"]["ports"][0]["port"]) == variables()["MASTER_PORT"]
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert variables()["OUTPUT_DIR"].startswith("/runs/")
    assert pod()["restartPolicy"] == "OnFailure"
    assert int(variables()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod()["terminationGracePeriodSeconds"]
    assert "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 " in container["command"][2]


@pytest.mark.clusters
def test_the_start_command_trains_with_the_variables_that_kubernetes_sets(texts, tmp_path):
    words = pod()["containers"][0]["command"]
    flags = " ".join(map(str, [*runs.TINY, *texts, "--dry_run"]))
    assert words[:2] == ["sh", "-c"]
    changes = {"PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.free_port())}
    changes |= {"OUTPUT_DIR": str(tmp_path / "run"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    changes |= {"ACCELERATE_RECIPES_CACHE": str(tmp_path / "cache"), "PATH": f"{runs.BIN}:{os.environ['PATH']}"}
    pods = []
    try:
        for index in range(2):
            command = ["sh", "-c", f"{words[2]} {flags}"]
            pods.append(runs.start(command, **variables() | changes | {"JOB_COMPLETION_INDEX": str(index)}))
        outputs = ["".join(one.communicate(timeout=240)) for one in pods]
    finally:
        for one in pods:
            runs.end(one)
    assert [one.returncode for one in pods] == [0, 0], outputs
    assert len(re.findall(r"processes +2, DDP over gloo", "".join(outputs))) == 2  # each machine prints it
