"""Bounds on what one peer may do to a role, and how to take them out: more rows of `benchmarks.ablations`.

Most of them are met by the scenario `hostile`. A row that seeds are not expected to find says why.
"""

from benchmarks._safeguards import Ablation

MESSAGES, SERVER = "adam_async/messages/", "adam_async/parameter_server/"
TEST_MESSAGES, TEST_SERVER = "tests/adam_async/messages/", "tests/adam_async/parameter_server/"
CONTROLLER, TEST_CONTROLLER = "adam_async/controller/", "tests/adam_async/controller/"

BOUNDED = TEST_MESSAGES + "test_bounds.py::test_every_field_of_a_message_is_bounded"
REFUSED = "bad fields are refused"
CHECKS = TEST_SERVER + "test_question_checks.py::"


def _bound(name: str, old: str, new: str) -> Ablation:
    """A type of fields without its bounds."""
    return Ablation(
        name=f"{name} is bounded",
        file=MESSAGES + "bounds.py",
        old=old,
        new=new,
        guard=BOUNDED,
        breaks=REFUSED,
        scenario="hostile",
    )


BOUNDS = (
    _bound("a wait", "Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]", "Seconds = float"),
    _bound("a rate", "Rate = Annotated[float, Meta(ge=0.0, le=1e12)]", "Rate = float"),
    _bound("a drawn number", "DrawnId = Annotated[int, Meta(ge=0, le=(1 << 56) - 1)]", "DrawnId = int"),
    _bound("a staleness", "Staleness = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]", "Staleness = int"),
    _bound("a count", "Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]", "Count = int"),
    _bound("a number of images", "Images = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]", "Images = int"),
    _bound("an attempt", "Attempt = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]", "Attempt = int"),
    Ablation(
        name="a shard is named once in a question",
        file=SERVER + "question_checks.py",
        old="    if len(numbers) < 2 or len(set(numbers)) == len(numbers):\n",
        new="    if True:\n",
        guard=CHECKS + "test_what_no_honest_client_asks_is_refused_by_name",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="an epoch is at most one ahead",
        file=SERVER + "question_checks.py",
        old='        return "" if epoch <= most else',
        new='        return "" if True else',
        guard=CHECKS + "test_bounds_of_epochs_and_clocks_follow_the_run",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="what is for a later epoch holds up its own session alone",
        file=SERVER + "state.py",
        old="        if push.epoch > self._epoch or session in self.gated:\n",
        new="        if push.epoch > self._epoch or self.gated._sessions:\n",
        guard=TEST_SERVER + "test_state.py::test_what_waits_for_an_epoch_holds_up_its_own_session_only",
        breaks="the run ends, or every role lives",
        scenario="hostile",
    ),
    Ablation(
        name="a clock is one that a replica can have",
        file=SERVER + "question_checks.py",
        old='        return "" if clock <= most else',
        new='        return "" if True else',
        guard=CHECKS + "test_bounds_of_epochs_and_clocks_follow_the_run",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="an answer fits into a message",
        file=SERVER + "question_checks.py",
        old="        if size <= most_bytes:\n",
        new="        if True:\n",
        guard=CHECKS + "test_an_answer_that_no_message_holds_is_refused_before_it_is_made",
        seldom="models of simulated runs are smaller than a message",
        scenario="hostile",
    ),
    Ablation(
        name="a session belongs to the link that used it first",
        file=SERVER + "service.py",
        old="            text = self._speakers.refusal(request.link.peer, body)\n",
        new='            text = ""\n',
        guard=TEST_SERVER
        + "test_service.py::test_who_speaks_in_a_session_of_another_peer_is_told_so_and_changes_nothing",
        breaks="sessions belong to their workers",
        scenario="hostile",
    ),
    Ablation(
        name="each role sets its own keys of the map",
        file=CONTROLLER + "permissions.py",
        old="    if found is _WRONG:\n",
        new="    if False:\n",
        guard=TEST_CONTROLLER + "test_permissions.py::test_each_role_sets_what_the_table_gives_it",
        breaks="records belong to their roles",
        scenario="hostile",
    ),
    Ablation(
        name="a member sets its node as what its link says it is",
        file=CONTROLLER + "permissions.py",
        old='    if value.get("role") != peer.role or value.get("incarnation") != peer.incarnation:\n'
        "        return _WRONG\n",
        new="",
        guard=TEST_CONTROLLER
        + "test_permissions.py::test_a_member_sets_its_own_node_with_the_role_of_its_link",
        breaks="records belong to their roles",
        scenario="hostile",
    ),
    Ablation(
        name="each pair of roles has a key of its own",
        file="transport/keys.py",
        old='        info = b"\\0".join((_LABEL, first.encode(), second.encode()))\n',
        new="        info = _LABEL\n",
        guard="tests/transport/test_keys.py::test_each_pair_has_a_key_of_its_own_whichever_side_derives_it",
        breaks="keys prove one role",
        scenario="hostile",
    ),
    Ablation(
        name="a silent connection makes room for a new one",
        file="transport/entrance.py",
        old="        self._admission.arrived(greeter, source_of(host))\n",
        new="        if len(self._admission) >= self._admission._limit:\n"
        "            greeter.crowd_out()\n"
        "            return\n"
        "        self._admission.arrived(greeter, source_of(host))\n",
        guard="tests/transport/test_tcp.py::test_the_oldest_of_too_many_silent_connections_makes_room",
        breaks="honest peers are answered",
        scenario="hostile",
    ),
    Ablation(
        name="a ledger is taken from members alone",
        file="adam_async/data_server/ledger_service.py",
        old="            record is None\n"
        "            or not record.live\n"
        '            or (record.role, record.incarnation) != ("data", peer.incarnation)\n',
        new="            False\n",
        guard="tests/adam_async/data_server/test_ledger_service.py::"
        "test_a_ledger_of_a_non_member_in_a_later_term_is_not_taken",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="a link that only serves takes no messages",
        file="transport/endpoint.py",
        old="        if not self._receives:\n",
        new="        if False:\n",
        guard="tests/transport/test_intake.py::test_a_link_that_only_serves_ends_at_the_first_message",
        breaks="a link that only serves takes no messages",
        scenario="hostile",
    ),
    Ablation(
        name="an answer is begun only while there is room for it",
        file="transport/budget.py",
        old="        if (self.is_full and not alone) or not (self.fits(nbytes) or self._pass()):\n",
        new="        if False:\n",
        guard="tests/transport/test_budget.py::"
        "test_a_link_has_room_until_its_own_limit_and_one_answer_may_exceed_it",
        breaks="memory is bounded",
        scenario="hostile",
    ),
    Ablation(
        name="the part of a link is fixed and reserved",
        file="transport/budget.py",
        old="        budget.reserved_bytes += self.part_bytes\n",
        new="",
        guard="tests/transport/test_budget.py::"
        "test_links_that_come_one_after_the_other_and_take_all_they_get_stay_within_the_budget",
        seldom="a hundred silent peers fill a budget, and a seed has a handful",
        scenario="hostile",
    ),
    Ablation(
        name="what a link holds is given back at its end",
        file="transport/budget.py",
        old="        budget.beyond_bytes -= max(self.held_bytes - self.part_bytes, 0)\n"
        "        budget.held_bytes -= self.held_bytes\n",
        new="",
        guard="tests/transport/test_budget.py::test_a_closed_account_gives_back_all_that_it_held",
        breaks="memory is given back",
        scenario="hostile",
    ),
    Ablation(
        name="a number in a message is finite",
        file=MESSAGES + "body.py",
        old="    if look is not None and (found := look(body)):\n",
        new="    if False:\n",
        guard=TEST_MESSAGES + "test_bounds.py::test_a_number_without_bounds_is_refused_if_it_is_not_finite",
        seldom="the bounds of every number that has some refuse NaN too, as msgspec compares",
        scenario="hostile",
    ),
    Ablation(
        name="a record beside a message is no longer than it may be",
        file=MESSAGES + "tensors.py",
        old="    if size > most_bytes:\n",
        new="    if False:\n",
        guard=TEST_MESSAGES + "test_messages.py::test_what_is_too_long_is_refused_undecoded",
        seldom="virtual time passes while nothing is decoded, and the machine's own bound refuses the same",
        scenario="hostile",
    ),
    Ablation(
        name="a command is one that the machine can read",
        file=CONTROLLER + "contents.py",
        old="        msgspec.json.decode(read.value, type=dict[str, Any])\n",
        new='        return ""\n',
        guard=TEST_CONTROLLER + "test_violations.py::test_a_command_that_the_machine_cannot_read_is_named",
        seldom="no peer without the controllers' keys brings bytes into a log",
        scenario="hostile",
    ),
    Ablation(
        name="a message that breaks a rule of consensus is refused",
        file="adam_async/controller/consensus/core.py",
        old="        if isinstance(event, Received):\n            self._guard.check(",
        new="        if False:\n            self._guard.check(",
        guard="tests/adam_async/controller/consensus/test_violations.py::test_a_violation_names_its_rule",
        seldom="no peer without the controllers' keys speaks to a core",
        scenario="hostile",
    ),
    Ablation(
        name="the map has room for a record",
        file=CONTROLLER + "replicated_state.py",
        old="        if refusal:\n",
        new="        if False:\n",
        guard=TEST_CONTROLLER
        + "test_replicated_state.py::"
        + "test_a_full_map_takes_no_new_record_from_any_controller_and_its_members_go_on",
        seldom="a map of 8 MiB takes longer to fill than a seed may take",
        scenario="hostile",
    ),
    Ablation(
        name="a payload has the bytes that were sent",
        file="transport/frames.py",
        old="        if self._computed != expected:\n",
        new="        if False:\n",
        guard="tests/transport/test_frames.py::test_damage_of_a_payload_is_named",
        breaks="damage is noticed",
        scenario="training",
    ),
)
