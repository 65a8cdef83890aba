"""Tasks: one file per step of the chain, thin over `packhouse.steps`."""

import logging

from packhouse.terminal import EscapedRecord

logging.setLogRecordFactory(EscapedRecord)  # what tasks log repeats rows, files and manifests
