"""Safeguards of vectors and of the steps on them, and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

FOLDER = "adam_async/parameter_server/"
STEPS, NUMBERS, SHARD, PIECES = (
    FOLDER + name for name in ("vector_steps.py", "push_queue.py", "shard.py", "shard_pieces.py")
)
TESTS = "tests/adam_async/parameter_server/test_vector_steps.py::test_"
STORES, SUMS = (
    "tests/adam_async/store/test_vectors.py::test_",
    "tests/adam_async/model/test_vectors.py::test_",
)
MAP = "tests/adam_async/controller/test_store_vectors.py::test_"
OPEN = "the links of simulated clients lose few answers to steps, and other clients seldom step meanwhile"

_row = partial(Ablation, scenario="pushes")

VECTORS = (
    _row(
        "a step takes effect once on a shard",
        NUMBERS,
        "        statuses[tables] = None\n        if number == last + 1:",
        "        statuses[tables] = None\n        if number <= last + 1:",
        TESTS + "a_repeated_step_is_not_applied_and_gets_its_first_answer_after_later_changes",
        breaks="I2",
    ),
    _row(
        "a step waits for the pushes and steps before it",
        NUMBERS,
        "            statuses[tables] = GAP, last + 1",
        "            tables.ordered[session] = number",
        TESTS + "a_gap_is_named_and_a_server_of_another_assignment_takes_no_step",
        seldom="a new link repeats all open pushes in their order, so only a wrong client sends a gap",
    ),
    _row(
        "a shard keeps the dot products of a step",
        STEPS,
        "    shard.keep_dots(key, tuple(found))",
        "    del found",
        TESTS + "a_repeated_step_is_not_applied_and_gets_its_first_answer_after_later_changes",
        seldom=OPEN,
    ),
    _row(
        "an answer has the dot products of all shards or none",
        STEPS,
        "if not of_shards or len(of_shards) < len(kept):",
        "if not of_shards:",
        TESTS + "an_answer_has_the_dot_products_of_all_shards_or_none",
        seldom=OPEN,
    ),
    _row(
        "sums are computed aside",
        STEPS,
        "np.empty(size, applier.dtype), max(",
        "shard.vector(command.into), max(",
        TESTS + "a_result_that_is_not_finite_changes_nothing_on_its_shards",
        seldom="all sums of simulated clients are finite",
    ),
    _row(
        "a sum that is not finite is refused",
        STEPS,
        "if not applier.vectors.combine(",
        "if None is applier.vectors.combine(",
        TESTS + "a_result_that_is_not_finite_changes_nothing_on_its_shards",
        seldom="all sums of simulated clients are finite",
    ),
    _row(
        "a deleted vector refuses its steps and pushes",
        FOLDER + "state.py",
        "if (push.vector or push.commands is not None) and not push.named_vectors() <= self.vectors:",
        "if push.vector and push.commands is not None:",
        TESTS + "a_step_that_names_a_deleted_vector_is_refused_whole",
        seldom="simulated clients delete no vectors",
    ),
    _row(
        "pushes for several vectors are several batches",
        FOLDER + "state.py",
        "        if follower.push.vector != head.push.vector:\n            return False\n",
        "",
        TESTS + "pushes_for_a_vector_and_for_the_values_are_two_batches",
        breaks="I1",
    ),
    _row(
        "a copy has the dot products of its shards",
        PIECES,
        "            [(*step, dots) for step, dots in shard.dots.items()],",
        "            [],",
        TESTS + "a_joining_member_takes_a_step_on_the_shards_that_lack_it",
        seldom=OPEN,
    ),
    _row(
        "a copy has the vectors of its shards",
        PIECES,
        "            [vector_number(key) for key in _vector_keys(shard)],",
        "            [],",
        TESTS + "a_joining_member_takes_a_step_on_the_shards_that_lack_it",
        breaks="all copies return",
    ),
    _row(
        "the vectors of a server in copy are in its log",
        FOLDER + "served_store.py",
        "            self._follow_up(state.handle(VectorsChanged(self._vectors)))",
        "            self._set_vectors()",
        "tests/adam_async/store/test_vectors.py::test_lost_servers_change_nothing",
        breaks="equal copies",
    ),
    _row(
        "shards forget the oldest dot products",
        SHARD,
        "        while total > MOST_DOTS and len(self.dots) > 1:",
        "        while not total:",
        TESTS
        + "a_shard_forgets_the_dot_products_of_answered_and_of_the_oldest_steps_and_of_forgotten_sessions",
        seldom="it bounds memory",
    ),
    _row(
        "a sum is rounded by its bound only if that is sure",
        "adam_async/model/vectors.py",
        "    return total if is_sure else None",
        "    return total",
        SUMS + "a_sum_that_cancels_or_is_near_a_tie_is_exact",
        seldom="the sums of simulated clients are whole numbers",
    ),
    _row(
        "vectors need free memory on all members",
        "adam_async/controller/store_rules.py",
        "            if more > 0 and free.get(server, more) < more:",
        "            if more < 0:",
        MAP + "a_vector_for_which_a_server_lacks_memory_is_refused_with_the_number_of_bytes",
        seldom="simulated servers have memory for all vectors",
    ),
    _row(
        "a vector has a number that none had before",
        "adam_async/controller/store_rules.py",
        "if goes_on else old.vectors_made",
        "if goes_on else len(old.vectors)",
        MAP + "a_number_is_never_given_again",
        seldom="simulated clients delete no vectors",
    ),
    _row(
        "the record on the disk follows the vectors of the map",
        FOLDER + "served_store.py",
        "                self._host.disk.record_changed(store)",
        "                pass",
        STORES + "a_program_goes_on_from_the_disks_of_all_servers",
        scenario="power",
        seldom="a state names its vectors, and simulated clients add them before the first state",
    ),
    _row(
        "a step is charged with the memory of its sums",
        FOLDER + "served_store.py",
        "            nbytes = self._largest * len({command.into for command in commands.combine})",
        "            nbytes = 0",
        STORES + "a_step_is_charged_with_the_memory_of_its_sums",
        seldom="simulated links have memory for all steps",
    ),
)
