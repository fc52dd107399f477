"""Paged-KV paths of EAGLE draft decode and of the KV store, with the guards that upstream's fixes gave them.

Importing the package imports nothing else: `sizing` needs no torch, and each module loads only what it runs.
"""
