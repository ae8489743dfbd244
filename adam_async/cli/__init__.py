"""The command line `adam-async`: one file per command, or for a few commands on one subject.

`main.py` installs the signal handlers and limits BLAS to one thread. `commands.py` parses the command line,
and imports a command's file only when the command runs. `running.py` runs the command's coroutine in an event
loop. The command checks its options, calls other rooms, and prints results (`terminal.py`). `commands.py`
turns an error into one line and an exit code.

Files, in reading order:

    main.py, commands.py         entry point; the commands with their help, and the exit code of a call
    launch_commands.py           the commands below `launch`, made from the descriptions of launchers; a
                                 training that a launcher runs
    options.py                   options of commands: those of a run from its fields; others beside them
    link_speed.py                bandwidth and latency of `plan`, read from text with units
    running.py, signals.py       one event loop per command, with probes; Ctrl-C and SIGTERM

    option_checks.py             options of single commands, checked before their modules are imported
    train_checks.py              options of `train`, checked before the modules of a training are imported
    train.py                     `train`: options merged, a cluster started or joined, training, results
    train_lbfgs.py               `train --optimizer lbfgs`: a program of its own, on a store
    live_table.py                progress on a terminal as a table, elsewhere as lines; the summary
    results.py                   model, report, profile and record of a run, also of an interrupted one; the
                                 bare kernels measured before and after training, for a report
    replay.py                    `train --replay`: a recorded run repeated, and its weights compared
    launch_ranks.py              `launch torchrun`, `launch slurm --here`: roles of a rank, and the driver

    roles/                       `controller`, `ps`, `data`, `worker`: one role in this process
    from_environment.py          `role --from-env`: the roles that a batch job gives to this process
    token.py                     `token new` and `token derive`; the token, or keys of a role, for a command
    operation.py                 `status`, `logs`, `scale` and `stop`, in another shell
    dashboard.py                 the page of `train --dashboard`; `dashboard`: a cluster, or past runs
    store.py                     `store list`, `show`, `save` and `delete`

    checkpoint.py                `checkpoint list`, `verify` and `export`
    inspect.py, report.py        `evaluate` and `doctor`; `report`: runs compared in a table
    predict.py                   `predict`: classes of images; `export`: ONNX and PyTorch
    data.py                      images loaded for other commands, with the progress of downloads;
                                 `data inspect`: a source of images in numbers
    plan/                        `plan`: cuts of a model over workers, their predicted rates, the best one

    checkout.py                  `simulate` and `drill`, whose code a checkout has among its tests

    terminal.py                  results on stdout, notices and errors on stderr; tables and JSON
    files.py                     files that options name: checks, reads, atomic writes
"""
