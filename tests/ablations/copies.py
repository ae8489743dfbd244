"""Safeguards of shards with several copies and their removals; the rows with a seed are those of the core.

The scenario `pushes` finds most of them. A row that no seed is expected to find has the reason.
"""

from functools import partial

from tests.ablations.ablation import Ablation

FOLDER, TESTS = "adam_async/parameter_server/", "tests/adam_async/parameter_server/"
CORE, STATE, PIECES = FOLDER + "replication/", FOLDER + "state.py", FOLDER + "shard_pieces.py"
MEMBER, PRIMARY, SECONDARY = CORE + "member.py", CORE + "primary.py", CORE + "secondary.py"
CORE_TEST, STATE_TEST = TESTS + "replication/test_member.py::test_", TESTS + "test_state.py::test_"
ORDER_TEST, JOIN_TEST = TESTS + "test_replicated_state.py::test_", TESTS + "test_joining_"
SCENARIO = "tests/test_simulation/scenarios/test_pushes.py::test_"
KILLED = SCENARIO + "a_killed_server_costs_no_push_and_returns_with_all_copies"
SESSION = "tests/adam_async/client/test_session.py::test_"
SESSION += "open_pushes_are_sent_again_in_order_and_under_their_numbers"
EQUAL = TESTS + "test_shard_pieces.py::test_a_copy_made_of_pieces_is_equal_to_the_last_bit"
JOINED = TESTS + "test_bundle.py::test_a_copy_that_joins_by_pieces_amid_entries_ends_with_the_same_bits"
REPLAYED = "tests/adam_async/driver/replay/test_run.py::test_"
REPLAYED += "steps_that_only_some_shards_took_are_replayed_there_alone"
UNRECORDED = "the runs of the scenario are not recorded"

_row = partial(Ablation, scenario="pushes")
_training = partial(Ablation, scenario="training")
_members = partial(Ablation, scenario="members")

COPIES = (
    _row(
        "an entry is committed once all members in sync hold it",
        PRIMARY,
        "return {*copy.record.in_sync, *proposed} - {copy.me}",
        "return set()",
        CORE_TEST + "an_entry_is_committed_once_all_members_in_sync_hold_it",
        breaks="committed",
        seed=0,
    ),
    _row(
        "a member applies committed entries only",
        SECONDARY,
        "log.commit(min(self._watermark, self._equal))",
        "log.commit(self._equal)",
        KILLED,
        breaks="all copies return, or one log",
        seed=0,
    ),
    _row(
        "a message of an older generation is refused",
        MEMBER,
        "            return  # its sender learns from the cluster map of its replacement\n",
        "            if isinstance(message, Copy):\n"
        '                names = ("store", "home", "generation", "session", "position")\n'
        "                fields = {name: getattr(message, name) for name in names}\n"
        "                applied = min(self.log.applied, message.position)\n"
        "                held = Held(**fields, applied=applied, pieces=self.bundle.pieces)\n"
        "                self.send(sender, held)\n"
        "            return\n",
        CORE_TEST + "a_primary_that_was_replaced_commits_nothing_and_stops_when_it_learns_that",
        seldom="the map reaches a replaced primary within milliseconds; seeds of the core find it at once",
        seed=1,
    ),
    _row(
        "the new primary's entry takes the place of an uncommitted one",
        CORE + "local_copy.py",
        "if known is not None and known.generation == entry.generation:",
        "if known is not None:",
        CORE_TEST + "another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it",
        breaks="committed, or one log",
        seed=51,
    ),
    _row(
        "a member keeps its tail when a new primary begins",
        SECONDARY,
        "self._equal = max(self._equal, copy.log.committed)",
        "self._equal = copy.log.committed\n        copy.log._drop_from(self._equal + 1)",
        CORE_TEST + "after_two_successive_losses_an_acknowledged_entry_is_there",
        breaks="one log",
        seed=7,
    ),
    _row(
        "only a member in sync becomes the primary",
        "adam_async/controller/bundle_rules.py",
        "elif new.primary in old.in_sync:",
        "elif new.primary in old.members:",
        "tests/adam_async/controller/test_bundle_rules.py::test_a_joining_member_does_not_become_the_primary",
        seldom="a member that joins does not propose itself; the rule is for servers with a defect",
    ),
    _row(
        "a member is a node with its incarnation",
        MEMBER,
        "        super().__init__(me, bundle, record)\n",
        "        in_sync = tuple([me if each[0] == me[0] else each for each in record.in_sync])\n"
        "        record = __import__('msgspec').structs.replace(record, in_sync=in_sync)\n"
        "        super().__init__(me, bundle, record)\n",
        CORE_TEST + "a_process_that_was_started_again_is_no_member",
        seldom="the map, the links and the copy compare incarnations, and each makes up for the others",
        seed=3,
    ),
    _row(
        "a joining member counts once it is proposed",
        PRIMARY,
        "return {*copy.record.in_sync, *proposed} - {copy.me}",
        "return {*copy.record.in_sync} - {copy.me}",
        CORE_TEST + "a_joining_member_counts_from_the_moment_of_its_proposal",
        breaks="committed",
        seed=3,
    ),
    _row(
        "a struck-out member counts until the map has the change",
        PRIMARY,
        "return {*copy.record.in_sync, *proposed} - {copy.me}",
        "return {*(proposed or copy.record.in_sync)} - {copy.me}",
        CORE_TEST + "a_struck_out_member_counts_until_the_map_confirms_it",
        breaks="committed",
        seed=1,
    ),
    _row(
        "a joining member is added once it has all pieces",
        PRIMARY,
        "peer.has_begun and peer.pieces == self._copy.bundle.pieces and peer.held >= needed",
        "peer.has_begun and peer.held >= needed",
        CORE_TEST + "a_joining_member_without_pieces_is_not_added",
        breaks="an IndexError of a copy that lacks pieces, or I1",
        errors=("IndexError",),
        seed=2,
    ),
    _row(
        "a joining member is added once it has all entries",
        PRIMARY,
        "peer.pieces == self._copy.bundle.pieces and peer.held >= needed",
        "peer.pieces == self._copy.bundle.pieces",
        CORE_TEST + "a_joining_member_needs_the_tail_of_earlier_primaries",
        seldom="a piece waits for the entries in it; seeds of the core find it in a few runs",
        seed=3,
    ),
    _row(
        "an entry is committed by min_in_sync members at least",
        PRIMARY,
        "if len(copy.record.in_sync) < copy.bundle.min_in_sync:",
        "if False:",
        CORE_TEST + "below_min_in_sync_an_entry_waits_and_the_reason_is_named",
        breaks="min_in_sync",
        seed=6,
    ),
    _row(
        "a joining member applies no more than the primary",
        PRIMARY,
        "committed = log.committed if member in self._counted() else log.applied",
        "return log.committed, min(self._applied_by_all(), log.committed)",
        CORE_TEST + "a_joining_member_applies_no_entry_that_its_primary_has_not_applied",
        seldom="a primary applies an entry in the round of its commit; seeds of the core find it soon",
        seed=3,
    ),
    _row(
        "a piece has the numbers of applied pushes",
        PIECES,
        "list(tables.last_number.whole().items()),",
        "[],",
        EQUAL,
        breaks="equal copies",
    ),
    _row(
        "a piece has the clocks of replicas",
        PIECES,
        "{int(replica): clock for replica, clock in tables.clocks.items()},",
        "{},",
        EQUAL,
        breaks="equal copies",
    ),
    _row(
        "a joining server takes the log of a recorded run",
        PIECES,
        "        bundle.log.take(piece.log)\n",
        "        pass\n",
        EQUAL,
        seldom=UNRECORDED,
    ),
    _row(
        "the log has the reads of a step also if no shard here takes its push",
        FOLDER + "bundle.py",
        "if self.log is not None and reads is not None:",
        "if self.log is not None and reads is not None and queued.accepted:",
        JOINED,
        seldom=UNRECORDED,
    ),
    _row(
        "a replay passes over pushes of groups that the shard had",
        "adam_async/driver/replay/run.py",
        "if order.skipped[begin]:",
        "if False:",
        REPLAYED,
        seldom=UNRECORDED,
    ),
    _training(
        "pieces have the groups that shards have counted",
        PIECES,
        "groups=sets,",
        "groups={},",
        EQUAL,
        breaks="equal copies, or every group on every shard",
    ),
    _training(
        "a push names each group of its step",
        "adam_async/worker/pusher.py",
        "[group.lease.number for group in groups])",
        "[lease.number])",
        "tests/adam_async/exactness/test_groups.py::"
        "test_every_shard_has_every_group_once_and_frozen_shards_have_none",
        breaks="every group on every shard",
    ),
    _training(
        "a shard takes each group once",
        STATE,
        "order_groups(queued, tables if group is not None else None)",
        "pass",
        STATE_TEST + "a_shard_takes_each_group_once_whichever_session_sends_it",
        breaks="each group once",
    ),
    _training(
        "the groups of queued pushes count",
        STATE,
        "            order_groups(queued, tables if group is not None else None)\n",
        "            for shard in filter(None, shards):\n"
        "                shard.tables.ordered_groups = shard.tables.groups\n"
        "            order_groups(queued, tables if group is not None else None)\n",
        STATE_TEST + "a_group_that_waits_in_the_queue_is_taken_once",
        breaks="each group once",
    ),
    _training(
        "a push with some known groups waits",
        STATE,
        "if push.groups and knows_a_part(push, shards, session):",
        "if False:",
        STATE_TEST + "a_push_with_some_known_groups_must_wait_and_uses_no_number",
        seldom="a late push of a lost replica must have a step of several groups, one of them trained again",
    ),
    _members(
        "a returned group is a step of its own",
        "adam_async/worker/stepper.py",
        "return lease.attempt > 1",
        "return False",
        "tests/adam_async/worker/test_stepper.py::test_a_returned_group_is_a_step_of_its_own",
        breaks="steps are taken whole",
    ),
    _row(
        "a piece has the ended replica generations",
        PIECES,
        "ReplicasState(bundle.epoch, bundle.replicas.state(), len(log), pins, [*bundle.vectors])",
        "ReplicasState(\n"
        "            bundle.epoch, msgspec.structs.replace(bundle.replicas.state(), over=[], newest={})\n"
        "        )",
        TESTS + "test_bundle.py::test_a_copy_that_joins_by_pieces_amid_entries_ends_with_the_same_bits",
        breaks="equal copies",
    ),
    _row(
        "an entry is not applied again to a piece that has it",
        MEMBER,
        "return piece < len(pieces) and position > pieces[piece]",
        "return piece < len(pieces)",
        CORE_TEST + "an_entry_in_a_piece_is_not_applied_to_it_again_and_none_to_a_lacking_piece",
        seldom="a small store is one piece, which is there before the entries that it has are committed",
        seed=1,
    ),
    _row(
        "an entry has the verdict of each gradient",
        FOLDER + "log_entries.py",
        "        tuple(queued.accepted),\n        tuple(queued.refused),\n",
        "        tuple(sorted((*queued.accepted, *queued.refused))),\n        (),\n",
        TESTS + "test_log_entries.py::test_a_push_arrives_with_its_places_and_the_bits_of_its_gradients",
        breaks="equal copies",
    ),
    _row(
        "members take replicas and epochs from entries",
        FOLDER + "served_store.py",
        "        if self.is_primary:\n            self._follow_map(cluster)\n",
        "        if self.is_primary:\n"
        "            self._follow_map(cluster)\n"
        "        elif (store := cluster.store(self.store.id)) is not None:\n"
        "            live = {replica: pair[0] for replica, pair in cluster.pushers(store).items()}\n"
        "            self.bundle.replicas.change(live, self.bundle.shards.values())\n",
        KILLED,
        breaks="equal copies",
    ),
    _row(
        "members take the batches of the primary",
        FOLDER + "log_entries.py",
        "return Apply(tuple(queued))",
        "return Apply(tuple(queued)[::-1])",
        KILLED,
        breaks="equal copies",
    ),
    _row(
        "a handover waits until the successor has applied all entries",
        PRIMARY,
        "return log.applied == log.last == self._peers[successor].applied",
        "return True",
        CORE_TEST + "a_handover_waits_for_the_entries_that_are_not_applied",
        seldom="the successor has all committed entries; the cost is the answers to others",
        seed=22,
    ),
    _row(
        "pushes are sent again under their numbers",
        "adam_async/client/session.py",
        "        return list(self.open)\n",
        "        for exchange in self.open:\n"
        '            if exchange.message.type == "Push" and exchange.sent:\n'
        "                push = unpack(exchange.message, Push)\n"
        "                push = msgspec.structs.replace(push, numbers=self.numbers.next(push.shards))\n"
        "                exchange.message = pack(push, exchange.message.tensors)\n"
        "        return list(self.open)\n",
        SESSION,
        breaks="pending pushes end, or I2",
    ),
    _row(
        "a new primary begins with the applied numbers",
        STATE,
        "tables.ordered = tables.last_number.split()",
        "tables.ordered = type(tables.ordered)(0)",
        ORDER_TEST + "a_new_primary_orders_from_the_numbers_that_are_applied",
        breaks="pending pushes end, or I2",
    ),
    _row(
        "open requests are sent again in their order",
        "adam_async/client/session.py",
        "return list(self.open)\n",
        "return list(self.open)[::-1]\n",
        SESSION,
        seldom="each attempt applies the earliest push at least, so the cost is time only",
    ),
    _row(
        "a copy knows the links that its server has",
        FOLDER + "service.py",
        "if served.copy is not None:  # the member",
        "if served.copy is not None and member in served.copy.peers:  # the member",
        SCENARIO + "two_of_three_copies_may_be_lost_one_after_the_other",
        breaks="all copies return, or pending pushes end",
    ),
    _row(
        "a repetition of a refused push is refused",
        FOLDER + "push_queue.py",
        "return tuple([_with_verdict(problem, queued, session) for problem in queued.problems])",
        "return tuple(queued.problems)",
        ORDER_TEST + "a_repetition_of_a_refused_push_is_refused_again_also_by_a_new_primary",
        seldom="the gradients of the scenario are finite",
    ),
    _row(
        "a repeated tick finds its entry in flight",
        STATE,
        "if isinstance(each.entry, QueuedTick) and each.entry.tick == queued.tick:",
        "if False:",
        ORDER_TEST + "a_repeated_tick_in_flight_is_no_further_entry_and_is_answered_with_the_first",
        seldom="a further entry of the same tick changes nothing, and the cost is the length of the log",
    ),
    _row(
        "a joining member without progress is struck out",
        FOLDER + "members_watch.py",
        "        self.pause(stalled, now)\n        return stalled\n",
        "        return []\n",
        JOIN_TEST + "members.py::"
        "test_a_member_without_a_new_piece_is_stalled_also_if_it_begins_again_and_again",
        seldom="each server of the scenario can take up its copies",
    ),
    _row(
        "a session that came before the map begins again with the next copy",
        FOLDER + "server_links.py",
        "if outgoing is not None and (bundle in outgoing.begun or len(outgoing.begun) == MOST_BEGUN):",
        "if False:",
        JOIN_TEST + "copies.py::test_a_session_that_came_before_the_map_begins_again_with_the_next_copy",
        breaks="all copies return",
    ),
)
