"""Regressions: one test file a PR or issue, each a truth table over the cases that a scenario builds."""
