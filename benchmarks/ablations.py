"""How many seeds it takes until the simulator misses a safeguard that was taken out of the product.

    python -m benchmarks.ablations [--seeds 300] [--only TEXT] [--json FILE]

For each safeguard a copy of the packages is made, one piece of one file is replaced, and a scenario runs in a
process of its own, seed 1, 2, 3, ... until a run fails. One row each: the safeguard, the file, the scenario,
how many seeds it took (0: not found within `--seeds`), and the invariant that broke. A safeguard that dice
meet too seldom names the test that guards it instead.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("adam_async", "dataflow", "transport")

RUN = """
import json, sys
from adam_async.simulation.campaign import run_seed
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


@dataclass(frozen=True)
class Ablation:
    """A safeguard, and how the source looks with and without it."""

    name: str
    file: str
    old: str
    new: str
    scenario: str = "controllers"
    guard: str = ""
    """The test that guards it directly, where dice meet it too seldom."""


WORLDS = "tests/adam_async/consensus/test_ablations.py"
"""Worlds of the bare core, in which whether a group is calm is looked at for longer."""

CONSENSUS, CONTROLLER = "adam_async/consensus/", "adam_async/controller/"

ABLATIONS = (
    Ablation(
        "a vote is durable",
        CONSENSUS + "core.py",
        "        self._outbox.record(Ballot(term, vote))\n",
        "",
    ),
    Ablation(
        "nothing is said before it is synced",
        CONTROLLER + "group.py",
        "                    self._unwritten.append(effect)\n",
        "                    self._unwritten.append(effect)\n"
        "                    self._events.append(Persisted(number))\n",
    ),
    Ablation(
        "messages of old terms are refused (fence)",
        CONSENSUS + "core.py",
        "        elif message.term < self.term:\n            self._correct(message)\n            return\n",
        "",
    ),
    Ablation(
        "a snapshot has its term",
        CONSENSUS + "core.py",
        "Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)",
        "Snapshot(taken.index, 0, self.log.members_at(taken.index), taken.state)",
    ),
    Ablation(
        "only a log that ends as late is voted for",
        CONSENSUS + "core.py",
        "        granted = (ask.last_term, ask.last_index) >= (self.log.last_term, self.log.last_index)\n",
        "        granted = True\n",
    ),
    Ablation(
        "a majority is more than half",
        CONSENSUS + "membership.py",
        "return len(self.voters) // 2 + 1",
        "return (len(self.voters) + 1) // 2",
    ),
    Ablation(
        "one that lost its disk has another identity",
        CONSENSUS + "membership.py",
        'return f"{name}/{number:x}"',
        'return f"{name}/0"',
    ),
    Ablation(
        "a read waits for a round to a majority",
        CONSENSUS + "core.py",
        "                and leading.reads[0].round <= confirmed\n",
        "",
        guard="tests/adam_async/controller/test_service.py::test_a_read_of_a_leader_that_was_deposed_and_does_not_"
        "know_it_is_not_answered_with_what_is_old",
    ),
    Ablation(
        "a new leader answers watches when it has what earlier ones answered",
        CONTROLLER + "service.py",
        "        return self._ready and (",
        "        return self.group.leads and (",
        guard="tests/adam_async/controller/test_service.py::test_who_watches_over_changes_of_leaders_sees_each_"
        "version_once_and_the_map_never_goes_back",
    ),
    Ablation(
        "who lags keeps a watcher waiting",
        CONTROLLER + "service.py",
        "watch.after < self.map.version)",
        "watch.after != self.map.version)",
    ),
    Ablation(
        "a question that comes again is not done again",
        CONTROLLER + "machine.py",
        "        if question.number > session.number:\n",
        "        if True:\n",
    ),
    Ablation(
        "sessions are part of a snapshot",
        CONTROLLER + "machine.py",
        "_State(self.group, self.map, list(self._sessions.items()))",
        "_State(self.group, self.map, [])",
    ),
    Ablation(
        "a compare-and-set compares",
        CONTROLLER + "state.py",
        "        if version != command.expected:\n",
        "        if version < command.expected:\n",
    ),
    Ablation(
        "the death of an earlier incarnation changes nothing",
        CONTROLLER + "state.py",
        "if node is None or not node.live or node.incarnation != command.incarnation:",
        "if node is None or not node.live:",
    ),
    Ablation(
        "a loss is agreed on before anybody acts on it",
        CONTROLLER + "service.py",
        '            self.group.propose(("lost", node), Lost(node, incarnation))\n',
        "            from adam_async.controller.machine import command_bytes\n"
        "            self.machine.apply(0, command_bytes(Lost(node, incarnation)))\n"
        "            self._applied()\n",
    ),
    Ablation(
        "a new leader suspects all who do not come to it",
        CONTROLLER + "service.py",
        "            self._suspicion.led(self.map, self._links, now=self._loop.time())\n",
        "",
    ),
    Ablation(
        "what a restart found is synced before it is relied on",
        CONTROLLER + "log_file.py",
        "            await self._disk.truncate_durably(self._path, end)\n",
        "            pass\n",
    ),
    Ablation(
        "a torn record is cut off",
        CONSENSUS + "records.py",
        "if len(payload) == size and crc32(payload) == crc else None",
        "",
    ),
    Ablation(
        "a file that takes the place of another is written beside it first",
        CONTROLLER + "log_file.py",
        "        await self._disk.write_atomic(self._path, [writer.frame(records)])\n",
        "        await self._disk.append_durably(self._path, 0, writer.frame(records))\n",
    ),
    Ablation(
        "what becomes of the disk is not survived",
        CONTROLLER + "group.py",
        "                await file.append([persist.records for persist in batch])\n",
        "                try:\n"
        "                    await file.append([persist.records for persist in batch])\n"
        "                except ConfigError:\n"
        "                    pass\n",
    ),
    Ablation(
        "a leader asks before it raises the term (pre-vote)",
        CONSENSUS + "core.py",
        "        self._ask(pre=True)\n",
        "        self._campaign(Cause.ENCOURAGED)\n",
        guard=WORLDS,
    ),
    Ablation(
        "a leader that hears no majority gives up (check-quorum)",
        CONSENSUS + "core.py",
        "if leading.heard(self.members) < self._now - settings.election_s:",
        "if False:",
        guard=WORLDS,
    ),
    Ablation(
        "who hears a leader answers no candidate",
        CONSENSUS + "core.py",
        "if isinstance(message, AskVote) and not message.transfer and self._leader_is_near():",
        "if False:",
        guard=WORLDS,
    ),
)


def apart(ablation: Ablation, folder: Path) -> None:
    """Make a copy of the packages without a safeguard.

    Raises:
        SystemExit: The source has changed, and does not have the piece once.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / ablation.file
    source = path.read_text()
    if source.count(ablation.old) != 1:
        raise SystemExit(
            f"{ablation.name}: {ablation.file} has {ablation.old!r} {source.count(ablation.old)} times"
        )
    path.write_text(source.replace(ablation.old, ablation.new))


def seeds_until_found(ablation: Ablation, limit: int) -> dict[str, object]:
    """Run a scenario without a safeguard; see the module's text."""
    with tempfile.TemporaryDirectory() as folder:
        apart(ablation, Path(folder))
        command = [sys.executable, "-c", RUN, ablation.scenario, str(limit)]
        environment = {"PYTHONPATH": folder, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{ablation.name}: {done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--only", default="", help="only safeguards whose name has this in it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for ablation in ABLATIONS:
        if options.only not in ablation.name:
            continue
        row = asdict(ablation) | seeds_until_found(ablation, options.seeds)
        rows.append(
            {key: row[key] for key in ("name", "file", "scenario", "guard", "seeds", "invariant", "text")}
        )
        print(f"{row['seeds']:4} {row['name']}: {row['invariant']} {row['text']}"[:200], flush=True)
    found = sum(bool(row["seeds"]) for row in rows)
    print(f"{found} of {len(rows)} found within {options.seeds} seeds")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
