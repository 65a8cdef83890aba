"""A run: the chain, its steps and their cache, in this process or in several.

chain.py       validate -> format -> tokenize -> pack -> split -> publish, top to bottom
step.py        what a step is, and how a job of one is done
steps/         a step in each file
cache/         finished steps, found by their keys
local_pool.py  jobs in several processes
"""
