"""Run the chain: its steps and their cache, in one process or several.

chain.py       validate -> format -> tokenize -> pack -> split -> publish, top to bottom
step.py        definition of steps and jobs, and how a job runs
steps/         one file per step
cache.py       finished steps by key
local_pool.py  jobs in several processes
"""
