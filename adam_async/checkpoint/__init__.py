"""Checkpoints of runs, copies of shards from and to servers, and files of trained models.

During a run `writer.py` reads all shards by `shard_transfer.py`, and joins them into whole tensors
(`tensors.py`). `files.py` writes the tensors to a hidden folder, and renames the folder at the end. For a
resume `files.py` chooses the newest whole checkpoint, and `reader.py` checks each of its files.

    manifest.py, names.py          start here: content and files of a checkpoint, options of a resumed run;
                                   names of files and folders
    writer.py                      checkpoints during training: one at a time, misses, notes of progress
    shard_transfer.py, tensors.py  all shards read from the primaries, perhaps at one clock, or loaded into
                                   them; whole tensors, joined from shards and cut into shards
    files.py                       a folder of checkpoints: atomic write, `latest`, retention, resume
    reader.py                      one checkpoint from the disk; sizes and SHA-256 against the manifest
    verification.py, summary.py    `checkpoint verify` reads every byte; `checkpoint list` reads no tensor
Shards on the disks of servers (`train --store`, stores of clients):
    run_notes.py                   the driver's file of points from which a run can go on
    saved_shards.py                newest copy of each piece, found and read after the loss of all servers
Trained models:
    model_file.py, model_head.py   `model.safetensors`: weights, spec and class names in one file; its head
    trained_model.py               `Model`: loads such a file, and classifies images
"""
