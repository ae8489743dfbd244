"""Checkpoints of runs, copies of shards from and to servers, and files of trained models.

During a run `writer.py` reads all shards by `shard_transfer.py`. `files.py` writes each piece on arrival
(`new_checkpoint.py`) to a hidden folder, in the form of a server's disk, and finally renames the folder. For
a resume `files.py` chooses the newest whole checkpoint, and `reader.py` checks each of its files, and reads
its pieces again when they are loaded.

    checkpoint.py, names.py        start here: a checkpoint, and its pieces; names of its folder; options,
                                   model, data and results of the run; options of a resumed run
    writer.py                      checkpoints during training: one at a time, misses, notes of progress
    new_checkpoint.py              pieces between servers and disk, with bounded memory
    shard_transfer.py              all shards read from the primaries, perhaps at one clock, or loaded into
                                   them from any source
    tensors.py                     a source of shards; whole tensors, joined from shards and cut into shards
    files.py                       a folder of checkpoints: atomic write, `latest`, retention, resume
    reader.py                      one checkpoint from the disk: its head, or all of it
    verification.py                `checkpoint verify` reads every byte; `checkpoint list` reads no shard
    export.py                      values and rule state of a store as one file, tensor by tensor
Shards on the disks of servers (`train --store`, stores of clients):
    saved_shards.py                newest copy of each piece, and newest record of a run, found and read after
                                   the loss of all servers
Trained models:
    trained_model.py               `model.safetensors`: weights, spec and class names in one file; `Model`
                                   loads such a file, and classifies images
    model_head.py                  the head of such a file
"""
