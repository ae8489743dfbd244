"""The driver, which manages a training run.

`driver.py` prepares a run, submits it and its store to the controllers, and loads the first values into the
servers. `training_run.py` follows the map. After each epoch it evaluates the weights, takes a checkpoint if
the run has a folder for checkpoints, and lets the next epoch begin. At the end it collects the counts of all
roles into the result.

Files, in reading order:

    driver.py                        `Driver`: a run from its options to its result; takeover, ordered end
    settings.py                      access to the cluster; inputs of runs: model, step, checkpoint, folders
    preparation.py, calibration.py   checks, network, partition plan, first values, transforms; layer times
    readiness.py                     waits for roles; errors that name missing or lost roles

    training_run.py                  one run: waits, evaluations, checkpoints, the end
    evaluator.py                     accuracy on test and validation images, some shown with predictions
    predictions.py                   predictions of a run of another driver
    stopping.py                      early stopping: `patience`, `keep_best`, `until_accuracy`; losses of
                                     a run that diverges, or learns nothing
    epoch_checkpoints.py             checkpoints within an epoch, without a pause of the training

    role_counts.py, role_queries.py  questions to roles: counts, profiles, logs for a replay
    cluster_watch.py                 polls of all roles, for a driver or an operator; silent roles
    events.py                        incidents: deaths, returns, successors, moved primaries; notices
    requests.py                      an operator's `scale`, `stop`, `kill` and others, by way of the map

    takeover.py                      a program set in the map, changed, or taken over from another driver: its
                                     options and record; where it goes on
    saved_run.py                     a run on the disks of its servers: found, and its shards read
    recorder.py                      the record of a run: its epochs, and the logs of the bundles
    replay/                          the file of a record, and the repetition of the run to the last bit
"""
