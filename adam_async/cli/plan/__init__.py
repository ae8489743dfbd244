"""The command `plan`: ways to cut a model over workers, their predicted rates, and the best one.

`command.py` measures or estimates the layer times. `choice.py` makes all candidates with
`adam_async/model/partition/planner.py`, and recommends one. `command.py` prints them.

    command.py               start here: the steps of the command, and its table on the terminal
    choice.py                candidates: workers, kind of plan, images per group; the choice and its reason;
                             the JSON text for `--json`
"""
