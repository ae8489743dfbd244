"""The report of a run and its baseline; the doctor of a machine; the evaluation of a saved model.

`report.py` receives the result of a run, with the counts of every node, and builds one JSON document. The
document includes the reasons for options that the user left open (`defaults.py`), and the rate of the bare
kernels (`baseline.py`). The rate of the run divided by this rate is the efficiency. `compare.py` and
`plot.py` read finished reports.

Files, in reading order:

    schema.py       name of the format, checked before the classes of a report are imported
    report.py       schema and builder: totals, epochs, traffic, staleness, waits, events, nodes
    defaults.py     reasons, in words, for the values of the open options
    baseline.py     the same kernels on the same number of threads, without roles and messages
    sgemm.py        rate of the machine's matrix products (BLAS), in operations per second

    compare.py      reports side by side, a row for each quantity
    plot.py         accuracy, loss, rate, staleness, bytes and waits over time, with matplotlib

    doctor.py       checks of this machine: versions, caches, kernels, BLAS in threads, a link, the data
    evaluate.py     accuracy and loss of a model on test images, class by class
"""
