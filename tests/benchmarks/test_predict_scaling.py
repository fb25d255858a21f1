"""The prediction of data-parallel training has the right limits."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import predict_scaling
from benchmarks.predict_scaling import Network, Work

networks = st.builds(
    Network,
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(0, 1e-3),
    tree_latency=st.floats(0, 1e-3) | st.just(math.inf),
    ranks_per_machine=st.sampled_from([1, 4, 8]),
    machine_latency=st.floats(0, 1e-4),
    machine_bandwidth=st.floats(1e8, 1e12),
)
works = st.builds(
    lambda late, **values: Work(late_bytes=late * values["gradient_bytes"], **values),
    late=st.floats(0, 1),
    computation=st.floats(1e-3, 10),
    gradient_bytes=st.floats(1e6, 1e9),
    micro_batches=st.integers(1, 8),
)
ranks = st.integers(1, 4096)


def efficiency(count, work, network):
    return predict_scaling.predict(count, work, network)["efficiency"]


@given(works, networks)
def test_one_process_is_fully_efficient(work, network):
    assert efficiency(1, work, network) == 1


@given(ranks, works)
def test_links_without_latency_and_of_infinite_bandwidth_cost_nothing(count, work):
    assert efficiency(count, work, Network(math.inf, ranks_per_machine=8)) == pytest.approx(1, rel=1e-12)
    assert efficiency(count, work, Network(math.inf, tree_latency=0.0)) == pytest.approx(1, rel=1e-12)


@given(ranks, works, networks, st.floats(1, 100))
def test_a_step_is_never_slower_on_faster_links(count, work, network, factor):
    step = predict_scaling.predict(count, work, network)["step_seconds"]
    slack = 1 + 1e-9
    for faster in (
        replace(network, bandwidth=network.bandwidth * factor),
        replace(network, machine_bandwidth=network.machine_bandwidth * factor),
        replace(network, latency=network.latency / factor),
        replace(network, tree_latency=network.tree_latency / factor),
    ):
        assert predict_scaling.predict(count, work, faster)["step_seconds"] <= step * slack


@given(works, networks)
def test_efficiency_falls_with_the_number_of_machines(work, network):
    counts = [network.ranks_per_machine * 2**power for power in range(10)]
    found = [efficiency(count, work, network) for count in counts]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(found))


@given(ranks, works, networks)
def test_overlap_helps_and_never_hides_more_than_the_backward_pass(count, work, network):
    nothing_hidden = predict_scaling.exposed_seconds(count, 0.0, work, network)
    exposed = predict_scaling.exposed_seconds(count, work.backward, work, network)
    assert nothing_hidden - work.backward <= exposed * (1 + 1e-9) + 1e-9
    assert exposed <= nothing_hidden * (1 + 1e-9) + 1e-9


def test_an_all_reduce_takes_the_faster_of_ring_and_tree():
    assert predict_scaling.ring_seconds(1e9, 4, 0.01, 1e9) == pytest.approx(6 * 0.01 + 1.5)
    assert predict_scaling.tree_seconds(9e8, 512, 0.01, 1e9) == pytest.approx(18 * 0.01 + 2)
    network = Network(1e10, latency=1e-5, tree_latency=5e-5)
    for size, count, function, latency in [
        (1e9, 4, predict_scaling.ring_seconds, 1e-5),
        (1e6, 512, predict_scaling.tree_seconds, 5e-5),
    ]:
        expected = function(size, count, latency, 1e10)
        assert predict_scaling.all_reduce_seconds(size, count, network) == pytest.approx(expected)


def test_several_ranks_share_the_link_of_their_machine():
    inside = Network(1e9, latency=1e-4, ranks_per_machine=8, machine_bandwidth=4e11)
    assert predict_scaling.all_reduce_seconds(1e9, 8, inside) == pytest.approx(2 * 7 / 8 / 400)
    assert predict_scaling.all_reduce_seconds(1e9, 16, inside) == pytest.approx(2 * 7 / 8 / 400 + 2e-4 + 1)


def test_late_gradients_are_fully_exposed_and_others_only_after_the_backward_pass():
    network = Network(1e9, latency=1e-4)
    late, early = Work(1.0, 100e6, late_bytes=100e6), Work(1.0, 100e6)
    whole = predict_scaling.all_reduce_seconds(100e6, 2, network)
    assert predict_scaling.exposed_seconds(2, 1.0, late, network) == pytest.approx(whole)
    buckets = round(100e6 / predict_scaling.BUCKET)
    last = predict_scaling.all_reduce_seconds(100e6 / buckets, 2, network)
    assert predict_scaling.exposed_seconds(2, 1e3, early, network) == pytest.approx(last)  # only the last bucket
    assert predict_scaling.exposed_seconds(2, 0.0, early, network) == pytest.approx(buckets * last)


def row(link, step, share=0.1):
    return {
        "processes": 2,
        "link_mbit": link,
        "variant": "plain",
        "step_seconds": step,
        "communication_share": share,
    }


def test_a_check_adds_the_link_to_the_computation_unless_the_processes_waited_longer():
    free, slow, fast = row(0.0, 1.0, share=0.2), row(80.0, 1.8), row(8000.0, 2.0)
    alone = {**row(80.0, 1.0), "processes": 1}
    found = predict_scaling.check([free, slow, fast, alone], Work(0.0, 9.5e6, 9.5e6), Network())
    assert [line["predicted"] for line in found] == pytest.approx([1.8, 1.0])  # 9.5 MB at 0.95 x 10 MB/s: 1 s
    assert [line["error"] for line in found] == pytest.approx([0, -0.5])
