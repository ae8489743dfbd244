"""How many seeds it takes until the simulator misses a safeguard that was taken out, and which test does.

    python -m benchmarks.ablations [--seeds 300] [--all] [--only TEXT] [--json FILE]
    python -m benchmarks.ablations --guards [--only TEXT] [--json FILE]

For each safeguard a copy of the packages is made, and one piece of one file is replaced. Then a scenario runs
in a process of its own, seed 1, 2, 3, ... until a run fails. One row each: how many seeds it took (0: not
found within `--seeds`), the safeguard, what broke, and the test that guards it directly. Safeguards whose
absence dice meet too seldom are left out without `--all`; they say why.

With `--guards` it is the tests that run against the copy, one for each safeguard, after all of them have
passed with nothing taken out.

The exit code is 1 if a safeguard was not missed by what ought to miss it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks._bounds import BOUNDS
from benchmarks._safeguards import ABLATIONS, Ablation

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("adam_async", "dataflow", "transport")
BESIDE = ("tests", "pyproject.toml")
"""What a copy needs for its tests."""

FAILED = 1
"""How pytest ends when a test failed; everything else but 0 says that it could not run it."""

RUN = """
import json, sys
from adam_async.simulation.runner import run_seed
from adam_async.simulation.scenarios import SCENARIOS
scenario, seeds = SCENARIOS[sys.argv[1]], int(sys.argv[2])
found = {"seeds": 0, "invariant": "", "text": ""}
for seed in range(1, seeds + 1):
    result = run_seed(scenario, seed)
    if not result.ok:
        found = {"seeds": seed, "invariant": result.invariant, "text": result.text}
        break
print(json.dumps(found))
"""


@contextmanager
def copied(*, tests: bool) -> Iterator[Path]:
    """Make a copy of the packages, and of their tests if wanted, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in (*PACKAGES, *(BESIDE if tests else ())):
            if (ROOT / package).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / package, folder / package, ignore=ignored)
            else:
                shutil.copy(ROOT / package, folder)
        yield folder


@contextmanager
def taken_out(ablation: Ablation, folder: Path) -> Iterator[None]:
    """Take a safeguard out of a copy for as long as the block lasts.

    Raises:
        SystemExit: The source has changed, and does not have the piece once.
    """
    path = folder / ablation.file
    source = path.read_text()
    times = source.count(ablation.old)
    if times != 1:
        raise SystemExit(
            f"{ablation.name}: {ablation.file} has {ablation.old!r} {times} times instead of once"
        )
    path.write_text(source.replace(ablation.old, ablation.new))
    try:
        yield
    finally:
        path.write_text(source)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, so that it finds the packages there."""
    here = {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        check=False,
    )


def seeds_until_found(ablation: Ablation, limit: int) -> dict[str, object]:
    """Run a scenario without a safeguard; see the module's text."""
    with copied(tests=False) as folder, taken_out(ablation, folder):
        done = run(["-c", RUN, ablation.scenario, str(limit)], folder)
    if done.returncode:
        raise SystemExit(f"{ablation.name}: {done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def run_tests(tests: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, up to the first that fails.

    Without the house around them, which would compile the kernels of every copy; with the same examples.
    """
    alone = ["--noconftest", "--hypothesis-profile=ci", "-p", "no:cacheprovider"]
    return run(["-m", "pytest", "-q", "-x", *alone, *tests], folder)


def is_caught(ablation: Ablation, folder: Path) -> bool:
    """Whether a test fails without the safeguard that it guards.

    Raises:
        SystemExit: It neither passed nor failed.
    """
    with taken_out(ablation, folder):
        done = run_tests([ablation.guard], folder)
    if done.returncode not in (0, FAILED):
        raise SystemExit(f"{ablation.name}: {ablation.guard} cannot be run:\n{done.stdout[-2000:]}")
    return done.returncode == FAILED


def check_guards(ablations: Sequence[Ablation]) -> list[dict[str, object]]:
    """Run each guard with and without its safeguard; a row for each.

    Raises:
        SystemExit: A guard fails although nothing was taken out.
    """
    rows: list[dict[str, object]] = []
    with copied(tests=True) as folder:
        done = run_tests(sorted({ablation.guard for ablation in ablations}), folder)
        if done.returncode:
            raise SystemExit(f"a guard fails with nothing taken out:\n{done.stdout[-2000:]}")
        for ablation in ablations:
            caught = is_caught(ablation, folder)
            rows.append({"name": ablation.name, "guard": ablation.guard, "caught": caught})
            said = "caught" if caught else "not caught"
            print(f"{said:10} {ablation.name}: {ablation.guard}", flush=True)
    print(f"{sum(bool(row['caught']) for row in rows)} of {len(rows)} caught by their guards")
    return rows


def count_seeds(ablations: Sequence[Ablation], limit: int) -> list[dict[str, object]]:
    """Run seeds without each safeguard; a row for each, printed as a line of a table."""
    rows: list[dict[str, object]] = []
    print("| seeds | safeguard | what broke | guard |\n|---|---|---|---|")
    for ablation in ablations:
        found = seeds_until_found(ablation, limit)
        rows.append(
            {
                "name": ablation.name,
                "file": ablation.file,
                "scenario": ablation.scenario,
                "guard": ablation.guard,
                "expected": ablation.breaks,
                **found,
            }
        )
        broke = str(found["invariant"] or ablation.seldom)
        print(f"| {found['seeds']} | {ablation.name} | {broke} | `{ablation.guard}` |", flush=True)
    print(f"{sum(bool(row['seeds']) for row in rows)} of {len(rows)} found within {limit} seeds")
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--all", action="store_true", help="also those that seeds are not expected to find")
    parser.add_argument("--guards", action="store_true", help="run the tests that guard them, and no seeds")
    parser.add_argument("--only", default="", help="only safeguards whose name has this in it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [ablation for ablation in (*ABLATIONS, *BOUNDS) if options.only in ablation.name]
    if options.guards:
        rows = check_guards(chosen)
        missed = [row["name"] for row in rows if not row["caught"]]
    else:
        rows = count_seeds([each for each in chosen if each.breaks or options.all], options.seeds)
        missed = [row["name"] for row in rows if row["expected"] and not row["seeds"]]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if missed:
        raise SystemExit("not missed by what ought to miss them: " + "; ".join(map(str, missed)))


if __name__ == "__main__":
    main()
