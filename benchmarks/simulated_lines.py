"""Lines of services, state machines and protocols that simulated seeds run.

    python -m benchmarks.simulated_lines [--seeds 40] [--scenario NAME] [--json FILE]

The command runs seeds 1, 2, 3, ... of each scenario in this process. It prints a row for each file of
`FOLDERS` except `EXEMPT`: number of lines, share that ran, and the lines that did not. The exit code is 1 if
a row's share is below 90 %, or a seed failed. Only executable lines count, without `UNCOUNTED`. The command
needs `coverage`. 20 seeds of each scenario take four minutes of one core, twice as long as without coverage.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

LEAST = 90.0
"""Least share of lines that run in each file, in per cent."""

FOLDERS = (
    "adam_async/controller",
    "adam_async/controller/consensus",
    "adam_async/parameter_server",
    "adam_async/parameter_server/replication",
    "adam_async/data_server",
    "adam_async/worker",
    "transport",
)

FILES_OF_IMAGES = "images in files, shards, caches and object stores, read on threads"
ONE_PROCESS = "roles of one process that share memory; in a simulated cluster each is a machine of its own"
ONE_HOST = "memory and Unix sockets of the kernel; a simulated host has substitutes of its own"
INSTRUMENT = "made for tests and experiments on real networks"

EXEMPT: dict[str, str] = {
    **dict.fromkeys(
        [
            f"adam_async/data_server/{name}.py"
            for name in (
                "dataset",
                "group_producer",
                "image_cache",
                "sources/datasets",
                "sources/idx",
                "sources/published_sets",
                "sources/objects",
                "sources/synthetic",
                "staging/files",
                "staging/peer",
                "staging/plan",
                "staging/service",
                "standalone",
            )
        ],
        FILES_OF_IMAGES,
    ),
    "adam_async/worker/in_place_mode.py": ONE_PROCESS,
    "transport/local.py": ONE_PROCESS,
    **dict.fromkeys(
        [
            "adam_async/parameter_server/mapped_workers.py",
            "adam_async/worker/mapped_memory.py",
            "transport/regions.py",
            "transport/unix.py",
        ],
        ONE_HOST,
    ),
    "transport/slow.py": INSTRUMENT,
}
"""Files of these folders without a row, with the reason."""

UNCOUNTED = (
    r"def __repr__",
    r"raise NotImplementedError",
    r"if TYPE_CHECKING",
    r"@abstractmethod",
    r"^\s*\.\.\.$",
    # Options are checked at their construction, before a run.
    r"def __post_init__",
    # The callers of a group never propose such a step.
    r"raise MembershipError",
    # Diagrams are for documents.
    r"def diagram",
    # Roles of one process.
    r"class LocalNetwork",
    r"def _check_local",
    r"class (TrainedInPlace|InPlaceTrainer)\b",
    r"def (still|counted_by)\(",
)
"""Patterns of lines that do not count, with the lines indented below them."""


def measure(names: list[str], seeds: int) -> tuple[Any, list[str]]:
    """Run seeds of scenarios under coverage.

    Returns:
        The coverage, and the failed seeds.
    """
    import coverage

    covered = coverage.Coverage(
        data_file=None, config_file=False, include=[f"{ROOT}/{folder}/*" for folder in FOLDERS]
    )
    for pattern in UNCOUNTED:
        covered.exclude(pattern)
    covered.start()
    # Import after the start of coverage: the lines of a module run at its import.
    from tests.simulation.runner import run_seed
    from tests.simulation.scenarios import SCENARIOS

    failed = []
    for name in names or list(SCENARIOS):
        begin, count = time.process_time(), 0
        for seed in range(1, seeds + 1):
            result = run_seed(SCENARIOS[name], seed)
            count += result.seed_counts
            if not result.ok:
                failed.append(f"{name} {seed}: {result.invariant}: {result.text}")
        took_s = time.process_time() - begin
        print(f"{name}: {seeds} seeds, {count} count, {took_s:.0f} s", flush=True)
    covered.stop()
    return covered, failed


def rows(covered: Any) -> list[dict[str, Any]]:
    """Return a row for each file that counts."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if file in EXEMPT:
                continue
            _, lines, _, missing, text = covered.analysis2(str(path))
            if lines:
                share = 100 * (1 - len(missing) / len(lines))
                found.append({"file": file, "lines": len(lines), "share": round(share, 1), "missing": text})
    return found


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=40, help="seeds of each scenario")
    parser.add_argument("--scenario", action="append", default=[], help="run this scenario only; repeatable")
    parser.add_argument("--json", type=Path, help="file for the rows as JSON")
    options = parser.parse_args()
    covered, failed = measure(options.scenario, options.seeds)
    table = rows(covered)
    print(f"{'file':54}{'lines':>6}{'share':>8}  not run")
    for row in table:
        print(f"{row['file']:54}{row['lines']:>6}{row['share']:>7.1f}%  {row['missing']}")
    for why in dict.fromkeys(EXEMPT.values()):
        print(f"exempt: {', '.join(file for file in EXEMPT if EXEMPT[file] == why)}: {why}")
    low = [row["file"] for row in table if row["share"] < LEAST]
    print(f"{len(table)} files, {len(low)} below {LEAST:g} %: {', '.join(low) or 'none'}")
    for text in failed:
        print(f"failed: {text}")
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if low or failed else 0


if __name__ == "__main__":
    sys.exit(main())
