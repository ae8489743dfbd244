"""The head of a model's file, for tests that read no weights."""

import json
from pathlib import Path

from adam_async.checkpoint.model_head import FORMAT, METADATA_KEY
from adam_async.checkpoint.names import FILE_NAME
from adam_async.model.named import named_model


def write_head(folder: Path) -> None:
    """Make a folder with a model's file that has a head, and no tensors."""
    folder.mkdir()
    ours = json.dumps({"format_version": FORMAT, "spec": named_model("digits").to_dict()})
    header = json.dumps({"__metadata__": {METADATA_KEY: ours}}).encode()
    (folder / FILE_NAME).write_bytes(len(header).to_bytes(8, "little") + header)
