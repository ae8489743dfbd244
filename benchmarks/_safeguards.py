"""Safeguards of the controllers, and how to take them out: the rows of `benchmarks.ablations`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A safeguard, and how the source looks with and without it."""

    name: str
    file: str
    old: str
    new: str
    guard: str
    """The test that guards it directly: it passes, and fails without the safeguard."""
    breaks: str = ""
    """What a seed is known to say without it: an invariant, or an error; empty where none is expected to."""
    seldom: str = ""
    """Why none is."""
    scenario: str = "controllers"


CONSENSUS, CONTROLLER = "adam_async/controller/consensus/", "adam_async/controller/"
CORE_TESTS, CONTROLLER_TESTS = "tests/adam_async/controller/consensus/", "tests/adam_async/controller/"

CRASH_POINTS = (
    CONTROLLER_TESTS + "test_crash_points.py::"
    "test_after_a_crash_at_any_point_all_that_was_promised_is_there_and_a_controller_goes_on_with_it"
)

CALM = "what it costs is a change of leader and not an answer, and others like it cover for it"

ABLATIONS = (
    Ablation(
        name="a vote is durable",
        file=CONSENSUS + "core.py",
        old="        self._outbox.record(Ballot(term, vote))\n",
        new="",
        guard=CORE_TESTS + "test_core.py::test_a_vote_is_given_once_in_a_term_also_over_a_restart",
        breaks="I7",
    ),
    Ablation(
        name="a vote is given once in a term",
        file=CONSENSUS + "core.py",
        old="granted = granted and self.vote in (None, ask.sender)",
        new="granted = granted and True",
        guard=CORE_TESTS + "test_core.py::test_a_vote_is_given_once_in_a_term_also_over_a_restart",
        breaks="I7",
    ),
    Ablation(
        name="nothing is said before it is synced",
        file=CONTROLLER + "consensus_node.py",
        old="                    self._unwritten.append(effect)\n",
        new="                    self._unwritten.append(effect)\n"
        "                    self._events.append(Persisted(number))\n",
        guard=CRASH_POINTS,
        breaks="I7",
    ),
    Ablation(
        name="messages of old terms are refused (fence)",
        file=CONSENSUS + "core.py",
        old="        elif message.term < self.term:\n"
        "            self._correct(message)\n"
        "            return\n",
        new="",
        guard=CORE_TESTS + "test_core.py::test_a_leader_of_an_older_term_learns_of_the_newer_one_and_follows",
        breaks="I4, or two leaders in a term",
    ),
    Ablation(
        name="a snapshot has its term",
        file=CONSENSUS + "core.py",
        old="Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)",
        new="Snapshot(taken.index, 0, self.log.members_at(taken.index), taken.state)",
        guard=CORE_TESTS + "test_core.py::"
        "test_one_whose_entries_are_gone_is_sent_the_snapshot_in_pieces_and_then_the_rest",
        breaks="I7",
    ),
    Ablation(
        name="only a log that ends as late is voted for",
        file=CONSENSUS + "core.py",
        old="        granted = (ask.last_term, ask.last_index) >= (self.log.last_term, "
        "self.log.last_index)\n",
        new="        granted = True\n",
        guard=CORE_TESTS + "test_core.py::test_a_vote_is_for_a_log_that_ends_as_late_as_ones_own",
        breaks="I7",
    ),
    Ablation(
        name="entries follow an entry that both have",
        file=CONSENSUS + "core.py",
        old="if previous > self.commit and self.log.term_at(previous) != append.prev_term:",
        new="if self.log.term_at(previous) is None and previous > self.commit:",
        guard=CORE_TESTS + "test_core.py::test_entries_are_taken_only_after_an_entry_that_both_have",
        breaks="I7",
    ),
    Ablation(
        name="entries in conflict with the leader's go",
        file=CONSENSUS + "core.py",
        old="if entry.index > self.commit and self.log.term_at(entry.index) != entry.term:",
        new="if entry.index > self.log.last_index:",
        guard=CORE_TESTS + "test_core.py::test_entries_in_conflict_with_the_leaders_are_replaced",
        breaks="I7",
    ),
    Ablation(
        name="what the leader has committed is only believed of entries that are the same here",
        file=CONSENSUS + "core.py",
        old="self._commit_to(min(append.commit, match))",
        new="self._commit_to(min(append.commit, self.log.last_index))",
        guard=CORE_TESTS + "test_core.py::test_a_follower_commits_only_what_it_knows_to_be_the_same",
        seldom="one that was cut off must have entries that the others have, not know that, and one more",
    ),
    Ablation(
        name="a majority is more than half",
        file=CONSENSUS + "membership.py",
        old="return len(self.voters) // 2 + 1",
        new="return (len(self.voters) + 1) // 2",
        guard=CORE_TESTS + "test_membership.py::test_majorities_of_groups_one_step_apart_share_a_node",
        breaks="I7",
    ),
    Ablation(
        name="one that lost its disk has another identity",
        file=CONSENSUS + "membership.py",
        old='return f"{name}/{number:x}"',
        new='return f"{name}/0"',
        guard=CONTROLLER_TESTS
        + "test_consensus_node.py::test_a_controller_that_lost_its_disk_is_added_again_and_counts",
        breaks="I7",
    ),
    Ablation(
        name="an identity whose disk is gone leaves the group",
        file=CONTROLLER + "peer_controllers.py",
        old='            if olds:\n                return Step("remove", olds[0])\n',
        new="",
        guard=CONTROLLER_TESTS
        + "test_consensus_node.py::test_a_controller_that_lost_its_disk_is_added_again_and_counts",
        breaks="I15",
    ),
    Ablation(
        name="what is for an earlier identity is not taken",
        file=CONSENSUS + "core.py",
        old="if message.to != self.me:\n",
        new="if False:\n",
        guard=CORE_TESTS + "test_core.py::test_a_message_for_an_earlier_identity_is_ignored",
        seldom="a word must be on its way over the loss of a disk, and the link that carries it ends with it",
    ),
    Ablation(
        name="only who leads answers a read, when it is sure of that",
        file=CONTROLLER + "service.py",
        old="            case GetMap():\n                self.group.read(request)\n",
        new="            case GetMap():\n                self._tell(request, self._whole())\n",
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_"
        "is_old",
        breaks="I6",
    ),
    Ablation(
        name="a read waits for a round to a majority",
        file=CONSENSUS + "core.py",
        old="                and leading.reads[0].round <= confirmed\n",
        new="",
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_"
        "is_old",
        seldom="a leader that was deposed must be asked in the moment before it gives up",
    ),
    Ablation(
        name="a new leader answers watches when it has what earlier ones answered",
        file=CONTROLLER + "service.py",
        old="        return self._ready and (",
        new="        return self.group.leads and (",
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_new_leader_shows_nobody_a_map_that_is_older_than_what_was_answered_before_it",
        seldom="nothing checks in which order different watchers are shown what",
    ),
    Ablation(
        name="who lags keeps a watcher waiting",
        file=CONTROLLER + "service.py",
        old="watch.after < self.map.version)",
        new="watch.after != self.map.version)",
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_deposed_leader_that_does_not_know_it_takes_nobody_back_to_an_older_map",
        seldom="a leader that was deposed must be asked in the moment before it gives up",
    ),
    Ablation(
        name="a question that comes again is not done again",
        file=CONTROLLER + "replicated_state.py",
        old="        if request.number > session.number:\n",
        new="        if True:\n",
        guard=CONTROLLER_TESTS + "test_replicated_state.py::"
        "test_a_repeated_request_is_not_applied_again_and_gets_the_same_answer",
        breaks="I6",
    ),
    Ablation(
        name="sessions are part of a snapshot",
        file=CONTROLLER + "replicated_state.py",
        old="_State(self.group, self.map, list(self._sessions.items()))",
        new="_State(self.group, self.map, [])",
        guard=CONTROLLER_TESTS
        + "test_consensus_node.py::test_a_session_goes_on_in_those_who_begin_with_a_snapshot",
        breaks="I7",
    ),
    Ablation(
        name="a compare-and-set compares",
        file=CONTROLLER + "state.py",
        old="        if version != command.expected:\n",
        new="        if version < command.expected:\n",
        guard=CONTROLLER_TESTS + "test_state.py::test_a_compare_and_set_that_comes_too_late_changes_nothing",
        breaks="I6",
    ),
    Ablation(
        name="a life that another one has followed has no seat",
        file=CONTROLLER + "state.py",
        old="if new.incarnation in before:",
        new="if False:",
        guard=CONTROLLER_TESTS + "test_state.py::"
        "test_an_incarnation_that_another_one_followed_never_joins_again",
        seldom="a client has one life at a time; what an earlier one asked expects an older version",
    ),
    Ablation(
        name="the death of an earlier incarnation changes nothing",
        file=CONTROLLER + "state.py",
        old="if node is None or not node.live or node.incarnation != command.incarnation:",
        new="if node is None or not node.live:",
        guard=CONTROLLER_TESTS + "test_state.py::test_the_death_of_an_earlier_incarnation_changes_nothing",
        seldom="one that is lost by mistake takes its seat again, and nothing checks why it was lost",
    ),
    Ablation(
        name="a loss is agreed on before anybody acts on it",
        file=CONTROLLER + "service.py",
        old='            self.group.propose(("lost", node), Lost(node, incarnation))\n',
        new="            from adam_async.controller.replicated_state import command_bytes\n"
        "            self.machine.apply(0, command_bytes(Lost(node, incarnation)))\n"
        "            self._applied()\n",
        guard=CONTROLLER_TESTS + "test_service.py::test_a_loss_takes_effect_only_once_it_is_committed",
        breaks="I6",
    ),
    Ablation(
        name="a new leader suspects all who do not come to it",
        file=CONTROLLER + "service.py",
        old="            self._suspicion.led(self.map, self._links, now=self._loop.time())\n",
        new="",
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_members_that_come_to_the_next_leader_in_time_are_not_lost_and_the_others_are",
        seldom="all clients come back, and nothing checks that one which does not is missed",
    ),
    Ablation(
        name="what a restart found is synced before it is relied on",
        file=CONTROLLER + "log_file.py",
        old="            await self._disk.truncate_durably(self._path, end)\n",
        new="            pass\n",
        guard=CONTROLLER_TESTS + "test_log_file.py::"
        "test_a_torn_end_is_cut_off_and_the_file_goes_on_before_it",
        breaks="ConfigError",
    ),
    Ablation(
        name="a torn record is not read",
        file=CONSENSUS + "records.py",
        old="if len(payload) == size and crc32(payload) == crc else None",
        new="",
        guard=CORE_TESTS + "test_records.py::"
        "test_a_file_that_ends_anywhere_holds_all_whole_frames_and_ends_after_them",
        seldom="most records are smaller than a sector, which is there or not",
    ),
    Ablation(
        name="a file that takes the place of another is written beside it first",
        file=CONTROLLER + "log_file.py",
        old="        await self._disk.write_atomic(self._path, [writer.frame(records)])\n",
        new="        await self._disk.append_durably(self._path, 0, writer.frame(records))\n",
        guard=CONTROLLER_TESTS + "test_log_file.py::"
        "test_whenever_the_power_goes_the_old_file_is_there_or_the_new_one_and_no_part_of_either",
        seldom="the power must go in the moment of a snapshot",
    ),
    Ablation(
        name="what becomes of the disk is not survived",
        file=CONTROLLER + "consensus_node.py",
        old="                await file.append([persist.records for persist in batch])\n",
        new="                try:\n"
        "                    await file.append([persist.records for persist in batch])\n"
        "                except ConfigError:\n"
        "                    pass\n",
        guard=CONTROLLER_TESTS + "test_consensus_node.py::"
        "test_a_controller_whose_disk_fails_ends_and_the_others_go_on",
        breaks="I11, or I7 of one that goes on without what it said",
    ),
    Ablation(
        name="a term is raised by one who would be elected (pre-vote)",
        file=CONSENSUS + "core.py",
        old="        self._ask(pre=True)\n",
        new="        self._campaign(Cause.ENCOURAGED)\n",
        guard=CORE_TESTS + "test_core.py::test_a_minority_elects_nobody_and_raises_no_term",
        seldom=CALM,
    ),
    Ablation(
        name="a leader that hears no majority gives up (check-quorum)",
        file=CONSENSUS + "core.py",
        old="if leading.heard(self.members) < self._now - settings.election_s:",
        new="if False:",
        guard=CORE_TESTS + "test_core.py::test_a_leader_that_hears_no_majority_gives_up",
        seldom=CALM,
    ),
    Ablation(
        name="who hears a leader answers no candidate",
        file=CONSENSUS + "core.py",
        old="if isinstance(message, AskVote) and not message.transfer and self._leader_is_near():",
        new="if False:",
        guard=CORE_TESTS + "test_core.py::test_a_node_that_hears_a_leader_does_not_answer_a_candidate",
        seldom=CALM,
    ),
)
