"""The command `store` against servers in the loop of the test."""

import json
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from adam_async.cli.commands import run_command
from adam_async.cli.operation import print_copies, show_status
from adam_async.cli.options import StatusOptions, StoreOptions
from adam_async.cli.store import run_store
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError, RoleUnreachable, RunFailed, StoreError, first_cause
from adam_async.model.rules import Adagrad, Sgd
from adam_async.run.run_copies import BundleCopies, RunCopies
from adam_async.run.token_file import derived_text
from adam_async.store.store import ParameterStore
from tests.adam_async.store.servers import servers

TOKEN = "a token that nobody guesses"
ARRAYS = {"w": np.ones((3, 2), np.float32), "b\x1b[2J": np.zeros(())}
RULES = {"w": Sgd(rate=1.0), "b\x1b[2J": Adagrad()}


async def command(
    capsys: pytest.CaptureFixture[str], where: str, *words: Any, token: str = "", **options: Any
) -> str:
    """Run the command; returns its lines."""
    action, name, file = (*words, None, None)[:3]
    environment = {"ADAM_TOKEN": token} if token else {}
    capsys.readouterr()
    try:
        await run_store(
            action, name, file, StoreOptions(controller=where, **options), environment, Terminal()
        )
    except ExceptionGroup as group:
        raise first_cause(group) from None
    return capsys.readouterr().out


async def test_stores_are_listed_shown_saved_and_deleted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with servers(2) as where:
        assert await command(capsys, where, "list") == "no stores\n"
        async with ParameterStore.open(
            where, ARRAYS, rule=RULES, name="model-7", consistency="ssp:2"
        ) as store:
            await store.push({"w": np.ones((3, 2), np.float32)})
            await store.tick()
            listed = await command(capsys, where, "list")
            assert listed.splitlines()[1].split() == [
                *("model-7", "open", "ssp:2", "2", "32", "ps-0,", "ps-1", "1", "of", "1", "1")
            ]
            (found,) = json.loads(await command(capsys, where, "list", json=True))["stores"]
            assert (found["name"], found["bytes"], found["clients"]) == ("model-7", 32, 1)

            shown = await command(capsys, where, "show", "model-7")
            assert "model-7: open, ssp:2, 2 arrays of 32 bytes, id client-" in shown
            assert "\x1b[2J" not in shown
            assert r"b\x1b[2J" in shown
            assert "shard pushes" in shown
            details = json.loads(await command(capsys, where, "show", "model-7", json=True))
            w, b = details["arrays"]
            assert (w["name"], w["shape"], w["dtype"], w["rule"], w["bytes"]) == (
                "w",
                [3, 2],
                "float32",
                "sgd",
                24,
            )
            assert (b["shape"], b["rule"]) == ([], "adagrad")
            (client,) = details["clients"]
            assert client["node"].startswith("client-")
            assert client["place"] == "0"

            file = tmp_path / "new" / "model.safetensors"
            saved = await command(capsys, where, "save", "model-7", file)
            assert saved == f"saved 2 arrays of store model-7 to {file}\n"
            assert not load_file(file)["w"].any()

        with pytest.raises(ConfigError, match="removes 2 arrays of 32 bytes that 0 clients use: add --yes"):
            await command(capsys, where, "delete", "model-7")
        deleted = await command(capsys, where, "delete", "model-7", yes=True)
        assert deleted == "deleted store model-7: 2 arrays of 32 bytes\n"
        for action in ("show", "delete"):
            with pytest.raises(
                StoreError, match="store 'model-7' does not exist; stores of this cluster: none"
            ):
                await command(capsys, where, action, "model-7")
        with pytest.raises(
            StoreError, match=r"'model-7' does not exist; .*\. A store that is only on the disks of servers"
        ):
            await command(capsys, where, "save", "model-7", file)


async def test_the_copies_of_a_store_are_shown_with_their_servers(capsys: pytest.CaptureFixture[str]) -> None:
    async with servers(3) as where, ParameterStore.open(where, ARRAYS, name="net", copies=2):
        assert (await command(capsys, where, "list")).splitlines()[1].count("2 of 2") == 1
        (found,) = json.loads(await command(capsys, where, "list", json=True))["stores"]
        assert found["copies"]["copies"] == 2
        bundles = {bundle["home"]: bundle for bundle in found["copies"]["bundles"]}
        for home, bundle in bundles.items():
            assert bundle["primary"] == bundle["in_sync"][0] == home
            assert (len(bundle["in_sync"]), bundle["joining"]) == (2, [])

        shown = await command(capsys, where, "show", "net")
        options = StatusOptions(controller=where)
        await show_status(options, {}, Terminal())
        status = capsys.readouterr().out
        for home, bundle in bundles.items():
            row = [home, home, bundle["in_sync"][1], "-"]
            assert row in [line.split() for line in shown.splitlines()]
            assert row in [line.split() for line in status.splitlines()]
        assert "bundle of store 'net'" in status
        await show_status(StatusOptions(controller=where, json=True), {}, Terminal())
        read = json.loads(capsys.readouterr().out)
        assert read["store_copies"]["net"] == found["copies"]


def test_a_bundle_with_too_few_copies_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lost = BundleCopies(home="ps-0", primary="", in_sync=(), joining=())
    joining = BundleCopies(home="ps-1", primary="ps-2", in_sync=("ps-2",), joining=("ps-1",))
    print_copies("store 'net'", RunCopies(copies=2, min_in_sync=1, bundles=(lost, joining)), Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["ps-0", "lost", "-", "-"],
        ["ps-1", "ps-2", "-", "ps-1"],
    ]
    assert lines[3:] == [
        "bundle ps-0 of store 'net' has 0 of 2 copies in sync",
        "bundle ps-1 of store 'net' has 1 of 2 copies in sync",
    ]


async def test_keys_of_a_reader_show_stores_and_delete_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with servers(1, token=TOKEN) as where:
        async with ParameterStore.open(where, ARRAYS, name="model", token=TOKEN):
            reader = derived_text(TOKEN, "reader")
            assert "model" in await command(capsys, where, "list", token=reader)
            await command(capsys, where, "save", "model", tmp_path / "all.safetensors", token=reader)
            with pytest.raises(ConfigError, match="holds the keys of role reader, and this is a driver"):
                await command(capsys, where, "delete", "model", token=reader, yes=True)
        keys = derived_text(TOKEN, "client")
        assert "deleted" in await command(capsys, where, "delete", "model", token=keys, yes=True)


async def test_keys_of_a_client_delete_no_store_of_a_live_client_and_the_token_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with servers(1, token=TOKEN) as where:
        async with ParameterStore.open(where, ARRAYS, name="model", token=TOKEN):
            keys = derived_text(TOKEN, "client")
            with pytest.raises(RunFailed, match="clients create stores of no program in their own name"):
                await command(capsys, where, "delete", "model", token=keys, yes=True)
            for token in (TOKEN, derived_text(TOKEN, "driver")):
                async with ParameterStore.open(where, ARRAYS, name="other", token=TOKEN):
                    assert "deleted" in await command(capsys, where, "delete", "other", token=token, yes=True)


async def test_a_failed_command_leaves_the_cluster_and_is_not_lost(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adam_async.controller.status_log")
    async with servers(1) as where:
        with pytest.raises(StoreError, match="does not exist"):
            await command(capsys, where, "show", "none")
    assert not [text for text in caplog.messages if text.startswith("reader-") or "is lost" in text]


async def test_a_controller_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RoleUnreachable, match=r"cannot reach the controller at tcp://127\.0\.0\.1:9"):
        await command(capsys, "tcp://127.0.0.1:9", "list", wait=timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("words", "claim"),
    [
        (("list", "x"), "store list takes no name; show it with: adam-async store show x"),
        (("save", "x"), "store save needs a file: adam-async store save x FILE.safetensors"),
        (("delete", "x", "f"), "store delete takes no file: leave f out"),
        (("show", "x", "--yes"), "--yes belongs to store delete: leave it out"),
        (("remove", "x"), "list"),
        (("list", "--wait", "0s"), "--wait must be a time above 0"),
    ],
)
@pytest.mark.usefixtures("no_handlers")
def test_wrong_words_end_with_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], claim: str
) -> None:
    assert run_command(["store", "--controller", "tcp://127.0.0.1:9", *words]) == 2
    assert claim in capsys.readouterr().err
