"""The doctor finds broken parts, and no others."""

import asyncio
import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.errors import install_command
from adam_async.messages import role_table
from adam_async.model import LayerSpec, ModelSpec, Network, named_model
from adam_async.report import doctor
from adam_async.report.doctor import (
    Finding,
    _worst_error,
    check_data,
    check_extra,
    check_hardware,
    check_kernels,
    check_link,
    check_products,
    check_software,
    check_working_sets,
    examine,
    exit_code,
)
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.kernel_cache import VARIABLE
from adam_async.runtime.machine import describe_machine
from transport import Identity, Link, LinkConfig, TcpNetwork
from transport.config import LinkKind

MACHINE = describe_machine(loop="uvloop.loop")


@pytest.fixture(autouse=True)
def moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short measurements, because no test depends on their precision."""
    monkeypatch.setattr(doctor, "KERNELS_S", 0.04)


def network(link: LinkKind = "tcp") -> TcpNetwork:
    config = LinkConfig(link=link)
    return TcpNetwork(token=None, entropy=system_entropy, rules=role_table(), config=config)


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


async def test_nothing_is_broken_here() -> None:
    async with Disk() as disk:
        findings = await examine(disk=disk, entropy=system_entropy)

    assert [finding for finding in findings if finding.state == "broken"] == []
    assert exit_code(findings) == 0
    wanted = "python numpy blas rich cores kernels products link data".split()
    assert {*wanted, "memory nodes", "working set"} <= states(findings).keys()


@pytest.mark.parametrize(
    ("python", "numpy", "state"), [("3.10.12", "2.3.4", "broken"), ("3.11.0", "2.10.0", "ok")]
)
def test_old_versions_are_broken_compared_as_numbers(python: str, numpy: str, state: str) -> None:
    found = states(check_software(msgspec.structs.replace(MACHINE, python=python, numpy=numpy)))

    assert (found["python"], found["numpy"]) == (state, state)


def test_a_blas_with_several_threads_is_slow() -> None:
    warned = msgspec.structs.replace(MACHINE, warnings=["BLAS may use 8 threads"])
    assert states(check_software(warned))["blas"] == "slow"


def test_one_core_is_slow() -> None:
    assert states(check_hardware(msgspec.structs.replace(MACHINE, cores=1)))["cores"] == "slow"
    assert states(check_hardware(msgspec.structs.replace(MACHINE, cores=2)))["cores"] == "ok"


def test_several_memory_nodes_are_reported() -> None:
    near, far = (
        next(each.detail for each in check_hardware(machine) if each.what == "memory nodes")
        for machine in (MACHINE, msgspec.structs.replace(MACHINE, memory_nodes=2))
    )

    assert near.startswith("1: all memory is equally near") == (MACHINE.memory_nodes == 1)
    assert far.startswith("2: ")


async def test_without_numba_the_finding_names_the_package() -> None:
    finding = await check_kernels(named_model("digits"), 4, installed=False)

    assert finding.state == "slow"
    assert re.match(r"numpy: [\d,]+ images/s of digits at 4 images per group", finding.detail)
    assert finding.detail.endswith(install_command("fast"))


async def test_kernels_that_are_not_compiled_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    program = pytest.importorskip("adam_async.model.fast.program", reason="compiled kernels need numba")
    monkeypatch.setattr(program, "are_ready", lambda codes, dtype: False)
    finding = await check_kernels(named_model("digits"), 4, installed=True)

    assert finding.state == "ok"
    assert f"not all compiled in {os.environ[VARIABLE]} yet" in finding.detail


@pytest.mark.slow
async def test_kernels_that_cannot_be_kept_are_named_as_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("numba", reason="compiled kernels need numba")
    (tmp_path / "kernels").write_text("a file")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    finding = await check_kernels(named_model("digits"), 4, installed=True)
    assert finding.state == "slow"
    assert f"{tmp_path / 'kernels'} cannot be written to: each run compiles" in finding.detail


async def test_both_sets_of_kernels_are_timed() -> None:
    pytest.importorskip("numba", reason="compiled kernels need numba")
    cache = Path(os.environ[VARIABLE])
    await asyncio.to_thread(Network(named_model("digits"), kernels="numba").warm_up)
    finding = await check_kernels(named_model("digits"), 16, installed=True)

    assert finding.state == "ok"
    timed = re.search(r"compiled in (.*): ([\d,]+) images/s .* numpy ([\d,]+), ([\d.]+) of", finding.detail)
    assert re.search(r"; [\d.]+ of the rate of matrix products$", finding.detail)
    assert timed is not None
    fast, plain = (float(timed[number].replace(",", "")) for number in (2, 3))
    assert timed[1] == str(cache)
    assert float(timed[4]) == pytest.approx(plain / fast, abs=0.01)


async def test_kernels_are_timed_with_any_loss() -> None:
    spec = ModelSpec(
        name="fit",
        input_shape=(3,),
        layers=(LayerSpec.of("fc1", "dense", outputs=2), LayerSpec.of("loss", "mean_squared_error")),
    )

    assert "of fit at 2 images" in (await check_kernels(spec, 2, installed=False)).detail


def test_working_sets_name_the_cache_that_holds_them() -> None:
    caches = msgspec.structs.replace(MACHINE, l2_kb=288, l3_kb=1 << 20)
    unknown = msgspec.structs.replace(MACHINE, l2_kb=None, l3_kb=None)

    details = [finding.detail for finding in check_working_sets(caches, named_model("digits"), 16)]
    assert [detail.partition(":")[0] for detail in details] == [
        "within L3",
        "within L2",
        "within L2",
        "within L3",
    ]
    assert details[-1].startswith("within L3: conv1 to loss: ")
    for finding in check_working_sets(unknown, named_model("digits"), 1):
        assert finding.detail.startswith("caches unknown: ")


def test_the_finding_of_a_missing_extra_has_its_command() -> None:
    finding = check_extra("no-such-package-here", "fast", "it would help")

    assert finding.detail == f"not installed: it would help; {install_command('fast')}"


def test_something_broken_gives_code_one() -> None:
    assert (
        exit_code([Finding(state="slow", what="a", detail=""), Finding(state="ok", what="b", detail="")]) == 0
    )
    assert exit_code([Finding(state="broken", what="a", detail="")]) == 1


async def test_concurrent_products_are_compared_with_serial_ones() -> None:
    finding = await check_products(2)

    assert finding.state == "ok"


def test_a_wrong_product_is_a_large_error() -> None:
    a, b = np.ones((3, 4), np.float32), np.ones((2, 4), np.float32)
    right = a @ b.T
    wrong = right.copy()
    wrong[1, 1] += 1

    assert _worst_error(a, b, right) == 0.0
    assert _worst_error(a, b, wrong) == pytest.approx(0.2)
    assert _worst_error(np.full_like(a, np.nan), b, right) == np.inf


@pytest.mark.parametrize(
    ("link", "text"), [("tcp", "use TCP: see --link"), ("auto", "share memory, and train in place")]
)
async def test_a_link_is_timed(link: LinkKind, text: str) -> None:
    finding = await check_link(network(link))

    assert finding.state == "ok"
    assert finding.detail.endswith(f" us; processes of this host {text}")


async def test_an_address_that_is_taken_is_broken() -> None:
    async def on_link(link: Link) -> None:
        await link.wait_closed()

    taken = network()
    identity = Identity(role="controller", node="first", incarnation=1)
    async with taken.listen("tcp://127.0.0.1:0", identity, on_link) as listener:
        finding = await check_link(network(), listener.address)

    assert finding.state == "broken"
    assert listener.address in finding.detail


async def test_an_address_that_others_reach_needs_a_token() -> None:
    finding = await check_link(network(), "tcp://0.0.0.0:0")

    assert finding.state == "broken"
    assert "token" in finding.detail


async def test_the_digits_are_there_when_nothing_else_is(tmp_path: Path) -> None:
    async with Disk() as disk:
        finding = await check_data(disk, None, tmp_path)

    assert finding.state == "ok"
    assert finding.detail.startswith("digits, 1,437 training and 360 test images")


async def test_a_data_folder_that_is_none_is_broken(tmp_path: Path) -> None:
    async with Disk() as disk:
        finding = await check_data(disk, tmp_path / "gone", None)

    assert finding.state == "broken"
    assert "does not exist" in finding.detail
