"""The client of the parameter servers, for workers, stores and drivers: pushes, pulls, ticks, reports.

parameter_client.py  start here: all bundles of a store; back-pressure, the wait for answers, counts
session.py           pure: numbers, and the exchanges with one bundle that are not answered
connection.py        links to the primary of a bundle, and repetitions, to a new primary too
"""
