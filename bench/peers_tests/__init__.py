"""Run the peers' own tests, unchanged, on packhouse's code: `python -m bench.peers_tests`."""
