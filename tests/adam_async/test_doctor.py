"""The doctor finds what is broken, and finds nothing where nothing is."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.doctor import (
    Finding,
    _worst_error,
    check_data,
    check_extra,
    check_hardware,
    check_link,
    check_products,
    check_software,
    examine,
    exit_code,
)
from adam_async.machine import describe_machine
from adam_async.messages import role_table
from adam_async.ports import Disk, system_entropy
from transport import Identity, Link, TcpNetwork

MACHINE = describe_machine(loop="uvloop.loop")


def network() -> TcpNetwork:
    return TcpNetwork(token=None, entropy=system_entropy, rules=role_table())


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


async def test_nothing_is_broken_here() -> None:
    async with Disk() as disk:
        findings = await examine(disk=disk, entropy=system_entropy)

    assert [finding for finding in findings if finding.state == "broken"] == []
    assert exit_code(findings) == 0
    assert {"python", "numpy", "blas", "loop", "rich", "cores", "products", "link", "data"} <= states(
        findings
    ).keys()


def test_old_versions_are_broken() -> None:
    found = states(check_software(msgspec.structs.replace(MACHINE, python="3.10.12", numpy="2.3.4")))

    assert (found["python"], found["numpy"]) == ("broken", "broken")


def test_versions_are_compared_as_numbers() -> None:
    found = states(check_software(msgspec.structs.replace(MACHINE, python="3.11.0", numpy="2.10.0")))

    assert (found["python"], found["numpy"]) == ("ok", "ok")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"warnings": ["BLAS may use 8 threads"]}, "blas"),
        ({"uvloop": None}, "loop"),
        ({"loop": "asyncio"}, "loop"),
    ],
)
def test_what_works_but_slower_is_slow(change: dict, what: str) -> None:
    assert states(check_software(msgspec.structs.replace(MACHINE, **change)))[what] == "slow"


def test_one_core_is_slow() -> None:
    assert states(check_hardware(msgspec.structs.replace(MACHINE, cores=1)))["cores"] == "slow"
    assert states(check_hardware(msgspec.structs.replace(MACHINE, cores=2)))["cores"] == "ok"


def test_a_missing_extra_says_how_to_get_it() -> None:
    finding = check_extra("no-such-package-here", "fast", "it would help")

    assert finding.detail == "not installed: it would help; pip install 'adam-async[fast]'"


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


async def test_a_link_is_timed() -> None:
    finding = await check_link(network())

    assert finding.state == "ok"
    assert finding.detail.endswith(" us")


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
    assert finding.detail.startswith("digits, 1437 training and 360 test images")


async def test_a_data_folder_that_is_none_is_broken(tmp_path: Path) -> None:
    async with Disk() as disk:
        finding = await check_data(disk, tmp_path / "gone", None)

    assert finding.state == "broken"
    assert "does not exist" in finding.detail
