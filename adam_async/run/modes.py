"""Pure: the modes of a run, in which some options have an effect and others do not, with their cures.

`Only`, `Not` and `Idle` at the fields of `Config` name them. `check_modes` makes the errors, and the page of
options (docs/reference/options.md) has them as a table.
"""

from adam_async.option_types import Mode

# Modes that an option selects.
ASP = Mode("asp", "consistency", ("asp",), enter="give {consistency=asp}")
BSP = Mode("bsp", "consistency", ("bsp",), "give {consistency=bsp} too", "take another {consistency}")
IN_PLACE = Mode("in place", "weights", ("aliased",), leave="leave {weights} at auto")
CUT = Mode("a cut model", "partitions", (), "give {partitions=2} or more too", "train with {partitions=1}")
VERTICAL = Mode("plan vertical", "plan", ("vertical",), enter="give {plan=vertical}")
SGD = Mode("rule sgd", "rule", ("auto", "sgd"), enter="give {rule=sgd}")
STEPS = Mode("schedule step", "schedule", ("step",), enter="give {schedule=step} too")
VALIDATION = Mode(
    "validation images", "validation", enter="hold training images back, such as {validation=5000}"
)
AUGMENTED = Mode("augmented images", "augment", enter="give {augment=True}")
RECORDED = Mode("a record", "record", leave="record nothing")
PROCESSES = Mode("processes", "processes", enter="give {processes=True}")

# Modes that only the command or the cluster knows.
CHECKPOINTS = Mode("a folder for the checkpoints", enter="give --checkpoint DIR")
ON_DISK = Mode("a folder for the shards", enter="give --store DIR")
LINKED = Mode("links between processes", enter="give --processes")
BY_HAND = Mode("roles started by hand (--controller)", leave="leave --controller out")
DATA_HOSTS = Mode("data servers that stand alone", leave="give it where these are started")
STEP = Mode("a step of yours", leave="train a network")

MODES = tuple(mode for mode in globals().values() if isinstance(mode, Mode))
"""All modes, in the order above."""
