"""Number of seeds until a simulated run fails after the removal of a safeguard, and the test that guards it.

    python -m benchmarks.ablations [--seeds 300] [--all] [--scenario NAME] [--only TEXT] [--json FILE]
    python -m benchmarks.ablations --guards [--scenario NAME] [--only TEXT] [--json FILE]

`tests.ablations` has the safeguards. A separate process runs a scenario without one safeguard, seed 1, 2, 3,
... until a run fails. A replacement of source text in a copy of the packages removes the safeguard. A row per
safeguard: the number of seeds (0: not found within `--seeds`), the safeguard,
the broken invariant, and the test that guards it directly. An assertion of the code counts as a check.
Another exception that no check raises, such as a TypeError, counts only if the safeguard declares
its type (`Ablation.errors`). Otherwise further seeds run, and a line shows the number of such runs with the
first exception. Without `--all`, the benchmark skips safeguards whose removal seeds seldom show; with it,
their rows have the reason.

With `--guards` the guarding tests run instead of seeds: all of them with every safeguard, then each without
its safeguard.

The exit code is 1 if an expected failure did not appear.
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

from tests.ablations.ablation import ROOT, Ablation
from tests.ablations.every import EVERY

PACKAGES = ("adam_async", "dataflow", "transport")
BESIDE = ("tests", "pyproject.toml")
"""Further files of a copy."""

FAILED = 1
"""Exit code of pytest after a failed test. Other codes than 0 and this one mean that pytest could not run."""

RUN = """
import json, sys
from tests.simulation.runner import run_seed
from tests.simulation.scenarios import SCENARIOS
scenario, seeds = SCENARIOS[sys.argv[1]], int(sys.argv[2])
found = {"seeds": 0, "invariant": "", "text": "", "errors": 0, "error": ""}
for seed in range(1, seeds + 1):
    result = run_seed(scenario, seed)
    if result.is_error and result.invariant not in ("AssertionError", *sys.argv[3:]):
        found["errors"] += 1
        found["error"] = found["error"] or f"seed {seed}: {result.invariant}: {result.text}"
    elif not result.ok:
        found |= {"seeds": seed, "invariant": result.invariant, "text": result.text}
        break
print(json.dumps(found))
"""


@contextmanager
def copied() -> Iterator[Path]:
    """Make a copy of the packages and their tests for the duration of the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in (*PACKAGES, *BESIDE):
            if (ROOT / package).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / package, folder / package, ignore=ignored)
            else:
                shutil.copy(ROOT / package, folder)
        yield folder


@contextmanager
def removed(ablation: Ablation, folder: Path) -> Iterator[None]:
    """Remove a safeguard from a copy during the block."""
    path = folder / ablation.file
    source = path.read_text()
    path.write_text(ablation.removed_from(source))
    try:
        yield
    finally:
        path.write_text(source)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python on the packages of a copy."""
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
    """Run seeds of a scenario without a safeguard until a check fails, or an exception of a declared type.

    Returns:
        The number of seeds, or 0 if none found it; the invariant with the observation; the number of runs
        that ended with other exceptions, and the first of these.
    """
    with copied() as folder, removed(ablation, folder):
        done = run(["-c", RUN, ablation.scenario, str(limit), *ablation.errors], folder)
    if done.returncode:
        raise SystemExit(f"{ablation.name}: {done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def run_tests(tests: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy up to the first failure.

    The tests run without `conftest.py`, which would compile the kernels of every copy, and with fixed
    examples.
    """
    options = ["--noconftest", "--hypothesis-profile=ci", "-p", "no:cacheprovider"]
    return run(["-m", "pytest", "-q", "-x", *options, *tests], folder)


def is_caught(ablation: Ablation, folder: Path) -> bool:
    """Whether the guarding test fails without its safeguard.

    Raises:
        SystemExit: The test neither passed nor failed.
    """
    with removed(ablation, folder):
        done = run_tests([ablation.guard], folder)
    if done.returncode not in (0, FAILED):
        raise SystemExit(f"{ablation.name}: {ablation.guard} cannot be run:\n{done.stdout[-2000:]}")
    return done.returncode == FAILED


def check_guards(ablations: Sequence[Ablation]) -> list[dict[str, object]]:
    """Run each guard with and without its safeguard; return a row for each.

    Raises:
        SystemExit: A guard fails with all safeguards in place.
    """
    rows: list[dict[str, object]] = []
    with copied() as folder:
        done = run_tests(sorted({ablation.guard for ablation in ablations}), folder)
        if done.returncode:
            raise SystemExit(f"a guard fails with all safeguards in place:\n{done.stdout[-2000:]}")
        for ablation in ablations:
            caught = is_caught(ablation, folder)
            rows.append({"name": ablation.name, "guard": ablation.guard, "caught": caught})
            verdict = "caught" if caught else "not caught"
            print(f"{verdict:10} {ablation.name}: {ablation.guard}", flush=True)
    print(f"{sum(bool(row['caught']) for row in rows)} of {len(rows)} caught by their guards")
    return rows


def count_seeds(ablations: Sequence[Ablation], limit: int) -> list[dict[str, object]]:
    """Run seeds without each safeguard; print a line of a table and return a row for each."""
    rows: list[dict[str, object]] = []
    errors: list[str] = []
    print("| seeds | safeguard | what broke | guard |\n|---|---|---|---|")
    for ablation in ablations:
        found = seeds_until_found(ablation, limit)
        rows.append(
            {
                "name": ablation.name,
                "removal": ablation.file,
                "scenario": ablation.scenario,
                "guard": ablation.guard,
                "expected": ablation.breaks,
                **found,
            }
        )
        broke = str(found["invariant"] or ablation.seldom)
        print(f"| {found['seeds']} | {ablation.name} | {broke} | `{ablation.guard}` |", flush=True)
        if found["errors"]:
            errors.append(f"{ablation.name}: {found['errors']} runs ended with exceptions, {found['error']}")
    print(f"{sum(bool(row['seeds']) for row in rows)} of {len(rows)} found within {limit} seeds")
    print("".join(f"not counted: {error}\n" for error in errors), end="")
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument(
        "--all", action="store_true", help="include safeguards that no seed is expected to find"
    )
    parser.add_argument("--guards", action="store_true", help="run the guarding tests instead of seeds")
    parser.add_argument("--only", default="", help="only safeguards whose name contains this text")
    parser.add_argument("--scenario", default="", help="only safeguards of this scenario")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [
        ablation
        for ablation in EVERY
        if options.only in ablation.name and options.scenario in ("", ablation.scenario)
    ]
    if options.guards:
        rows = check_guards(chosen)
        missed = [row["name"] for row in rows if not row["caught"]]
    else:
        rows = count_seeds([each for each in chosen if each.breaks or options.all], options.seeds)
        missed = [row["name"] for row in rows if row["expected"] and not row["seeds"]]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if missed:
        raise SystemExit("no failure after the removal of: " + "; ".join(map(str, missed)))


if __name__ == "__main__":
    main()
