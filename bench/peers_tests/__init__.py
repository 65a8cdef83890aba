"""The tests of peers, in their own files, on packhouse's code: `python -m bench.peers_tests`."""
