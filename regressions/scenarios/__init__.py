"""Scenarios: how the code under test is driven. One file a kernel path.

Each has ``case(fix, **options) -> Case``, built before anything runs and from arithmetic of its own, and an entry that
runs in a leg's process. ``OPTIONS`` names the options that a person may give on the command line.
"""
