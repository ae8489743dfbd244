"""The page that shows a run, a cluster, or past runs in a browser.

state.py      start here: pure; folds the events of a run into the parts of the page; curves
access.py     pure; the token, sessions, and the hosts that a request may name
past_runs.py  the runs of a folder, from reports and files of events
server.py     the shell: HTTP, its limits, operations
files/        page, style and scripts, which the browser gets as they are
"""
