"""Tensor parallelism and DTensors, on two processes of this machine."""

from pathlib import Path

from tests.processes import in_a_new_process


def test_two_processes_have_the_results_of_one():
    script = str(Path(__file__).with_name("shard_ranks.py"))
    told = in_a_new_process(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert told == "equal"
