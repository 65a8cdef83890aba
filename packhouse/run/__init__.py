"""Run the chain: its steps and their cache, in one process or several.

chain.py       the plan of all jobs, and running them step by step
step.py        steps and jobs, and how jobs run in one or several processes
steps/         one file per step
step_cache.py  finished steps by key, pins of running jobs, jobs of the last run
"""
