"""Pure: names of the files and folders of models and checkpoints."""

FILE_NAME = "model.safetensors"
"""Name of a trained model's file in the folder of `train --out`."""


def is_folder_name(name: str) -> bool:
    """Return whether a name is that of a checkpoint's folder."""
    head, *numbers = name.split("-")
    return head == "checkpoint" and len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers)


def age_order(name: str) -> tuple[int, ...]:
    """Return the key that sorts the names of checkpoint folders, older ones first."""
    return tuple(int(number) for number in name.split("-")[1:])
