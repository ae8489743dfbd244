"""Descriptions of runs, stores and the cluster: options, records of the cluster map, shards, results.

`option_sources.py` merges the sources of options into one `Config`, which checks itself. `learning_rate.py`
decides the epochs, rate and schedule that the user left open. `training_program.py` encodes options, model
and partition plan into a program record. The driver submits this record to the cluster map
(`cluster_map.py`), where workers and data servers read it. Each party computes the same shard table from a
store's record and its arrays (`shard_table.py`). Roles send their counts to the driver, which updates the
progress (`progress.py`) and returns a `RunResult` (`result.py`).

Files, in reading order:

    config.py                        every option of a run, with its facts and checks; the modes that options
                                     need or that exclude them; the deadlines of waits
    option_sources.py                precedence: defaults, TOML file, `ADAM_*` variables, command line
    memory_sizes.py                  memory in options: for images, for peers, for the processes of a role
    image_size.py                    the one size of all images of a data set
    addresses.py, token_file.py      addresses of roles and controllers; root token, or keys of one role
    stragglers.py                    intentionally slow nodes and links: `--slow`
    learning_rate.py                 default rate, lower for stale gradients; warm-up and schedule
    model_selection.py               a model that fits the data: `auto`, named, or of a file; its memory

    cluster_map.py                   nodes, stores, program, epoch, dealer: one snapshot value
    map_changes.py                   changes from version to version of the map, for watchers
    training_program.py              a training run as a program: its blob and its terms
    run_record.py                    program, counts and evaluations of a run: the memory of drivers and disks
    store_record.py, arrays.py       a store: arrays, rules, consistency, servers; its bundles: copies in sync
                                     and joining; specification of an array
    store_checks.py                  bounds of a store's record, new or placed
    shard_table.py                   placement: arrays to shards, shards to buckets, buckets to servers
    partition.py                     the cut of a model over workers (model parallelism); arrays, shards
    epoch_shares.py                  groups of an epoch dealt to replicas: in a pool, in ranges, in rounds
    group_ranges.py                  sets of groups as ranges, of a step or counted by a shard; sums of losses
    ids.py                           types of the ids and numbers in messages

    train_step.py, step_model.py     a user's step in the place of a network; the step as a network
    user_code.py                     transforms, layers and steps imported by path; allowed modules
    user_rules.py                    update rules imported by path; those that servers allow, by digest

    progress.py                      state of a run for the live table
    counts.py                        the numbers that each role counts, from their owners to the report;
                                     counts and evaluation of an ended epoch
    series.py                        one sample per second of training; sums of staleness and waits
    result.py                        results of epochs, of checkpoints and of a whole run
    run_copies.py                    copies of a run's shards; the primary that clients use
    condition.py                     verdict, losses survived, limit of the rate, waits with deadline and cure
    cluster_status.py                roles, run, copies and condition of a cluster, as `status` shows them
    events.py                        the events of a run and of stores: one tagged union
"""
