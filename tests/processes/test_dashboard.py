"""The page in Chromium: it loads fast, shows a run, ends roles by a button, and needs no mouse and no width.

Needs Chromium and Playwright. `ADAM_SCREENSHOTS=docs/images` writes the pictures of the pages.
"""

import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from adam_async.run.counts import Evaluation
from adam_async.run.events import Evaluated, IncidentBegins, Noted
from tests.adam_async.dashboard_events import AT, beginning, epochs, poll, predicted
from tests.processes.commands import Command, children_of, roles_among

httpx = pytest.importorskip("httpx")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytest.importorskip("uvicorn", reason="needs the extra dashboard")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.timeout(400),
    # Playwright's loop of this thread is closed by the interpreter.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TRAIN = (
    *("train", "--data", "digits", "--processes", "--servers", "3", "--copies", "2", "--replicas", "2"),
    *("--controllers", "3", "--epochs", "100000", "--dashboard", "127.0.0.1:0", "--allow-operations"),
)
PATIENCE_MS = 60_000
SHOTS = os.environ.get("ADAM_SCREENSHOTS")
HAS_AXE = util.find_spec("axe_playwright_python") is not None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """A page of a browser without any memory; an error of its scripts, or a broken policy, fails the test."""
    own = browser.new_context(**context)
    page = own.new_page()
    page.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None
    )
    page.goto(url)
    page.wait_for_selector("#run:not([hidden])")
    yield page
    own.close()
    assert errors == []


def address_in(command: Command) -> str:
    found = re.search(r"dashboard: (http\S+)", command.wait_for("dashboard: http"))
    assert found is not None
    return found[1]


@contextmanager
def past(tmp_path: Path, **files: bytes) -> Iterator[str]:
    """The command `dashboard` with a folder of files of events; the address of its page."""
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(text)
    with Command("dashboard", "--runs", str(tmp_path)) as command:
        yield address_in(command)


def lines(*events: Any) -> bytes:
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def shot(page: Any, name: str) -> None:
    """Write a picture of a page, with few colors, if a folder for pictures is set."""
    if SHOTS:
        page.evaluate("document.activeElement.blur()")
        with Image.open(BytesIO(page.screenshot(full_page=True))) as picture:
            picture.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(
                f"{SHOTS}/{name}.png", optimize=True
            )


def test_ten_thousand_epochs_and_two_hundred_roles_load_in_a_second(browser: Any, tmp_path: Path) -> None:
    many = (*poll(1, 180, 16), *poll(2, 180, 16))
    with (
        past(tmp_path, long=lines(beginning(), *many, *epochs(10_000), predicted())) as url,
        opened(browser, url) as page,
    ):
        page.wait_for_selector("#accuracy svg")
        taken = []
        for _ in range(5):
            begin = time.monotonic()
            page.goto(url.partition("#")[0])
            page.wait_for_selector("#accuracy svg")
            page.wait_for_selector("#roles .box >> nth=196")
            taken.append(time.monotonic() - begin)
        points = page.eval_on_selector(
            "#accuracy path", "path => path.getAttribute('d').match(/[ML]/g).length"
        )
        assert 500 < points <= 1000
        assert page.locator("#workers tbody tr").count() == 180
        assert statistics.median(taken) < 1.0, taken


def test_two_past_runs_lie_over_each_other(browser: Any, tmp_path: Path) -> None:
    runs = {"first": lines(beginning(), *epochs(20)), "second": lines(beginning("run-2"), *epochs(40))}
    with past(tmp_path, **runs) as url, opened(browser, url) as page:
        page.select_option("#which", "first.jsonl")
        page.select_option("#other", "second.jsonl")
        page.wait_for_selector("#loss path.compared")
        assert page.locator("#accuracy .series").count() == 2
        assert "second.jsonl" in page.locator("#loss .key").inner_text()
        page.get_by_label("time", exact=True).check()
        assert "s" in page.locator("#loss svg text").last.text_content()
        assert page.locator("#link").inner_text() == "a past run"


def test_a_file_of_a_stranger_runs_no_script_and_its_nearly_equal_values_are_drawn(
    browser: Any, tmp_path: Path
) -> None:
    evil = "<img src=x onerror=\"document.title='evil'\">"
    begins = msgspec.structs.replace(beginning(), model=evil, data=evil)
    equal = [
        Evaluated(at=2.0, evaluation=Evaluation(epoch=number, test_accuracy=accuracy))
        for number, accuracy in enumerate((0.3, 0.1 + 0.2), start=1)
    ]
    events = (begins, *poll(1), *equal, Noted(at=3.0, text=evil))
    with past(tmp_path, first=lines(*events)) as url, opened(browser, url) as page:
        page.wait_for_selector("#accuracy svg")
        assert page.locator("#title").inner_text() == f"{evil} on {evil}"
        assert page.title() != "evil"
        assert page.locator("img").count() == 0


def test_a_wrong_token_shows_nothing_and_the_right_one_signs_in(browser: Any, tmp_path: Path) -> None:
    with past(tmp_path, first=lines(beginning(), *epochs(3))) as url:
        page = browser.new_page()
        page.goto(url.partition("#")[0])
        page.get_by_label("Token").fill("not the token of it")
        page.keyboard.press("Enter")
        page.get_by_text("This is not the token.").wait_for()
        assert page.locator("#run").is_hidden()
        page.get_by_label("Token").fill(url.partition("#")[2])
        page.keyboard.press("Enter")
        page.wait_for_selector("#loss svg")
        assert "#" not in page.url
        page.close()


def wait_until(page: Any, what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}: {page.locator('main').inner_text()}"
        page.wait_for_timeout(100)


def epochs_shown(page: Any) -> int:
    found = re.search(r"epoch (\d+) of", page.locator("#facts").inner_text())
    return int(found[1]) if found else 0


def incident(page: Any, kind: str, subject: str) -> Any:
    return page.locator(f"#incidents .{kind}[data-subject='{subject}']")


def press_to(page: Any, condition: str) -> None:
    """Press Tab until the focus is where a JavaScript condition on `it` says."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate(f"(it => {condition})(document.activeElement)"):
            return
    pytest.fail(f"the Tab key does not reach {condition}")


def test_buttons_end_freeze_and_add_roles_and_the_page_shows_each_recovery(browser: Any) -> None:
    with Command(*TRAIN) as train:
        url = address_in(train)
        with opened(browser, url, viewport={"width": 1280, "height": 900}) as page:
            for part in ("#loss svg", "#accuracy svg", "#speed svg", "#staleness svg", "#first canvas"):
                page.wait_for_selector(part)
            page.wait_for_selector("#roles .box.worker >> nth=1")
            wait_until(page, "bytes on the links", lambda: page.locator("#roles .bytes").count())
            assert page.locator("#live").inner_text() == "2 / 2"
            assert page.locator("#survives").inner_text() == "1"
            wait_until(page, "a limit", lambda: len(page.locator("#limited").inner_text()) > 1)
            assert page.eval_on_selector(
                "#first canvas",
                "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v % 255)",
            )

            by_keyboard(page)
            processes = roles_among(children_of(train.pid))
            page.locator("#roles .box.ps").first.click()
            killed = page.locator("#role-title").inner_text()
            page.get_by_role("button", name="End it now").click()
            wait_until(page, "the loss of a primary", lambda: incident(page, "lost", killed).count())
            before = epochs_shown(page)
            for kind in ("lost", "failover", "copies"):
                wait_until(
                    page,
                    f"the end of {kind}",
                    lambda kind=kind: (
                        incident(page, kind, killed).count()
                        and not page.locator(f"#incidents .{kind}.open").count()
                    ),
                )
            wait_until(page, "further epochs", lambda: epochs_shown(page) > before + 2)
            assert roles_among(children_of(train.pid))[killed] != processes[killed]

            page.get_by_role("button", name="Add a worker").click()
            wait_until(
                page, "a further worker", lambda: "started worker-2" in page.locator("#answer").inner_text()
            )
            wait_until(page, "its replica", lambda: page.locator("#live").inner_text().startswith("3 /"))
            shot(page, "dashboard")
            freezes(page)
            without_faults(page, browser, url)
        assert children_of(train.pid)


def by_keyboard(page: Any) -> None:
    """End a worker without a mouse."""
    page.locator("body").click(position={"x": 2, "y": 2})
    press_to(page, "it.classList.contains('skip')")
    press_to(page, "it.classList.contains('worker')")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    node = page.locator("#role-title").inner_text()
    press_to(page, "it.dataset.fault === 'kill'")
    page.keyboard.press("Enter")
    wait_until(page, "the loss of a worker", lambda: incident(page, "lost", node).count())
    wait_until(page, "its return", lambda: not page.locator("#incidents .lost.open").count())


def freezes(page: Any) -> None:
    """Freeze a worker, whose silence shows and ends."""
    page.locator("#roles .box.worker").last.click()
    node = page.locator("#role-title").inner_text()
    page.get_by_role("spinbutton").fill("6")
    page.get_by_role("button", name="Freeze it").click()
    wait_until(page, "a silence", lambda: incident(page, "silent", node).count())
    wait_until(page, "its end", lambda: not page.locator("#incidents .silent.open").count())


def without_faults(page: Any, browser: Any, url: str) -> None:
    """Width, darkness, a lost connection and accessibility, on the page of a run."""
    page.context.set_offline(True)
    page.wait_for_selector("#link[data-state=lost]")
    assert "no connection; the page is of" in page.locator("#link").inner_text()
    page.context.set_offline(False)
    page.wait_for_selector("#link[data-state=live]")

    if HAS_AXE:
        assert serious_faults(page) == []
    with opened(
        browser, url, viewport={"width": 400, "height": 800}, color_scheme="dark", device_scale_factor=1
    ) as narrow:
        narrow.wait_for_selector("#staleness svg")
        narrow.wait_for_selector("#first canvas")
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
        colors = narrow.evaluate(
            "(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))"
        )
        back, ink = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
        assert back < 150 < 500 < ink
        shot(narrow, "dashboard-narrow")


def serious_faults(page: Any) -> list[str]:
    """Serious faults that axe-core finds."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.skipif(not HAS_AXE, reason="needs axe-playwright-python")
def test_axe_finds_no_serious_fault_light_or_dark_wide_or_narrow(browser: Any, tmp_path: Path) -> None:
    lost = IncidentBegins(
        at=AT + 2, incident="lost", subject="ps-1", text="ps-1 died", deadline_s=9.0, cure="x"
    )
    run = lines(beginning(), *epochs(20), *poll(1), *poll(2), lost, predicted())
    looks: tuple[dict[str, Any], ...] = (
        {"viewport": {"width": 1280, "height": 900}},
        {"viewport": {"width": 400, "height": 800}, "color_scheme": "dark"},
    )
    with past(tmp_path, first=run) as url:
        for look in looks:
            with opened(browser, url, **look) as page:
                page.wait_for_selector("#accuracy svg")
                page.wait_for_selector("#first canvas")
                page.locator("#roles .box.ps").first.click()
                page.get_by_role("dialog").wait_for()
                assert serious_faults(page) == []
                page.keyboard.press("Escape")
                assert serious_faults(page) == []


def test_a_page_of_a_running_cluster_asks_its_driver(tmp_path: Path) -> None:
    token = {"ADAM_TOKEN": "a token that nobody guesses"}
    words = [word for word in TRAIN if word not in ("--dashboard", "127.0.0.1:0")]
    with Command(*words, environment=token) as train:
        where = re.search(r"status --controller (\S+)", train.wait_for("status --controller"))
        assert where is not None
        train.wait_for("epoch 3/")
        there = ("--controller", where[1], "--allow-operations")
        with Command("dashboard", *there, environment=token) as command:
            url, _, secret = address_in(command).partition("#")
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as page:
                offer = page.post("session", json={"token": secret}).json()

                def shows(condition: Callable[[Any], object], part: str = "now") -> None:
                    """Ask for a part until a condition on it is true."""
                    deadline = time.monotonic() + PATIENCE_MS / 1000
                    while not condition(found := page.get(f"view/{part}").json()):
                        assert time.monotonic() < deadline, found

                def asks(**body: object) -> httpx.Response:
                    """Ask for an operation."""
                    run = page.get("view/now").json()["status"]["run"]["id"]
                    headers = {"X-Session-Proof": offer["proof"]}
                    return page.post("operate", json={"run": run, **body}, headers=headers)

                shows(lambda curves: len(curves["accuracy"]) > 3 and len(curves["loss"]) > 3, "curves")
                shows(lambda now: any(worker["images_per_s"] for worker in now["workers"]))
                shows(lambda found: found is not None and len(found["first"]) == 12, "samples")
                assert asks(action="kill", node="worker-0").json() == {"text": "worker-0 was killed"}
                shows(lambda now: lost_and_back(now, "worker-0"))
                refused = asks(action="kill", node="worker-9")
                assert (refused.status_code, "is no role of this cluster" in refused.text) == (409, True)
                assert asks(action="add", role="ps").json() == {"text": "started ps-3"}
                shows(lambda now: any(role["node"] == "ps-3" for role in now["status"]["roles"]))
        assert children_of(train.pid)


def lost_and_back(now: Any, node: str) -> bool:
    found = [each for each in now["incidents"] if (each["kind"], each["subject"]) == ("lost", node)]
    return any(each["lasted_s"] is not None for each in found)
