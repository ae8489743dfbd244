"""The steps of the Dockerfile hold without a builder; with buildah and its base image, the image trains."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def chart_user() -> int:
    """The user that the chart names for its containers."""
    (user,) = re.findall(
        r"^runAsUser: (\d+)$", (ROOT / "deploy/chart/templates/_helpers.tpl").read_text(), re.M
    )
    return int(user)


USER = chart_user()


def instructions() -> list[tuple[str, str]]:
    """The instructions of the file with their arguments."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    words = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in words]


def of(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def test_the_container_runs_a_command_of_the_wheel_as_the_user_of_the_chart() -> None:
    (user,), (entry,) = of("USER"), of("ENTRYPOINT")

    assert user == f"{USER}:{USER}"
    assert json.loads(entry)[0] in PROJECT["scripts"]
    assert instructions().index(("USER", user)) > max(
        number for number, (name, _) in enumerate(instructions()) if name == "FROM"
    )


def test_both_stages_have_one_python_that_the_wheel_accepts_and_extras_that_it_has() -> None:
    images = {image.partition(" ")[0] for image in of("FROM")}
    (run,) = of("RUN")

    assert len(images) == 1
    found = re.fullmatch(r"python:3\.(\d+)-slim", images.pop())
    assert found is not None
    assert int(found[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    extras = re.search(r"whl\)\[([a-z,]+)\]", run)
    assert extras is not None
    assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "cli" in extras[1].split(",")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_its_command_installs_the_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "dist", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"needs pip, and the package index for hatchling: {made.stderr.strip()[-300:]}")
    (run,) = of("RUN")
    (copied,) = (words for words in of("COPY") if not words.startswith("--from"))
    assert [file.name for file in tmp_path.glob(copied.split()[0])] == [
        file.name for file in (tmp_path / "dist").iterdir()
    ]
    (tmp_path / "dist").rename(tmp_path / "wheels")
    here = run.replace("/opt/adam", str(tmp_path / "adam")).replace("/wheels/", f"{tmp_path}/wheels/")
    here = here.replace("python -m venv", f"{sys.executable} -m venv")
    installed = subprocess.run(["sh", "-c", here], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    (entry,) = of("ENTRYPOINT")
    program = tmp_path / "adam" / "bin" / json.loads(entry)[0]
    answer = subprocess.run([program, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout.strip()) == (0, PROJECT["version"])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_image_trains_as_the_user_of_the_chart(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("buildah") is None:
        pytest.skip("needs root and buildah")
    base = of("FROM")[1]

    def buildah(*words: object) -> "subprocess.CompletedProcess[str]":
        command = ["buildah", *map(str, words)]
        isolated = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        return subprocess.run(
            command, cwd=tmp_path, env=isolated, capture_output=True, text=True, check=False
        )

    if (pulled := buildah("pull", "--policy", "missing", base)).returncode:
        pytest.skip(f"needs the image {base}: {pulled.stderr.strip()[-200:]}")
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        tmp_path / "dist",
        ".",
    ]
    made = subprocess.run(wheel, cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"needs pip, and the package index for hatchling: {made.stderr.strip()[-300:]}")
    tag = f"adam-async-test:{os.getpid()}"
    file = ROOT / "deploy" / "Dockerfile"
    built = buildah("bud", "--pull=never", "--network=host", "-f", file, "-t", tag, tmp_path)
    assert built.returncode == 0, built.stderr
    container = ""
    try:
        container = buildah("from", "--pull=never", f"localhost/{tag}").stdout.strip()
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        os.chown(scratch, USER, USER)
        train = "adam-async train --data digits --epochs 3 --processes --servers 2 --kernels numpy --quiet"
        words = f"id -u; cd /srv/tmp && HOME=/srv/tmp TMPDIR=/srv/tmp {train}"
        done = buildah("run", "--volume", f"{scratch}:/srv/tmp:rw", container, "--", "sh", "-c", words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0] == str(USER)
        assert re.search(r"test accuracy [\d.]+% after 3 epochs", done.stdout + done.stderr), done.stdout
    finally:
        buildah("rm", container)
        buildah("rmi", f"localhost/{tag}")
