"""Kills by single steps of workers in place and of their server: each group is counted once."""

import pytest

from tests.processes.mapped_kills import COMPILED, NUMPY, SERVER, kill_servers, kill_workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_each_step_of_a_worker_that_is_killed_in_any_phase_is_applied_and_counted_once() -> None:
    kill_workers([phase for phase in NUMPY if phase != "unmap"], replicas=1, kernels="numpy")


def test_workers_go_on_beside_one_that_is_killed_in_any_phase() -> None:
    kill_workers(NUMPY, replicas=2, kernels="numpy")


def test_each_step_of_a_killed_compiled_job_is_applied_and_counted_once() -> None:
    kill_workers(COMPILED, replicas=1, kernels="numba")


def test_a_run_goes_on_with_the_store_of_a_server_that_is_killed_in_any_phase() -> None:
    kill_servers(SERVER)
