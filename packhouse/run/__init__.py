"""Run the chain: its steps and their cache, in one process or several.

chain.py       the plan of all jobs; then validate -> format -> tokenize -> pack -> split -> publish
step.py        steps and jobs, and how jobs run in one or several processes
steps/         one file per step
cache.py       finished steps by key
cache_room.py  size of the cache: pins of running jobs, deletion and limits
"""
