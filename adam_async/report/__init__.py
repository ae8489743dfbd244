"""A run's report; its events and metrics; the doctor of a machine; the evaluation of a saved model.

`report.py` receives the result of a run, with the counts of every node, and builds one JSON document. The
document includes the rate of the bare kernels (`baseline.py`). The rate of the run divided by this rate is
the efficiency.

Files, in reading order:

    schema.py       name of the format, checked before the classes of a report are imported
    report.py       schema and builder: totals, epochs, traffic, staleness, waits, events, nodes;
                    reports side by side, a row for each quantity
    baseline.py     the same kernels on the same number of threads, without roles and messages

    stream.py       events of a run or a store, for any number of readers; callbacks of users;
                    events as lines of JSON in a file
    tensorboard.py  scalars of events in a file for TensorBoard
    metrics.py      counts and status in the text format of Prometheus

    doctor.py       checks of this machine: versions, caches, kernels, BLAS in threads, a link, the data
    evaluate.py     accuracy and loss of a model on test images, class by class
"""
